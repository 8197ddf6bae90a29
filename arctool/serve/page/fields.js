// The settings of a request: their names, bounds and words, and how they are read, from fields and from storage.

/** Numbers that the sampler takes; an empty field leaves the choice to the server. `above`: the least value itself is not allowed. */
export const NUMBERS = {
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 always takes the likeliest token" },
  top_p: { label: "Top p", min: 0, above: true, max: 1, step: 0.05, hint: "Likeliest tokens up to this share" },
  top_k: { label: "Top k", min: 0, max: 1_000_000, step: 1, whole: true, hint: "So many of the likeliest; 0 is off" },
  min_p: { label: "Min p", min: 0, max: 1, step: 0.01, hint: "Share of the likeliest token’s chance" },
  max_tokens: { label: "Max tokens", min: 1, max: 2 ** 31 - 1, step: 1, whole: true, hint: "The answer ends there" },
  seed: { label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, whole: true, hint: "Same seed, same answer" },
};

const MOST_STOPS = 16;

/** `{value}` or `{problem}` of what was typed; an empty field has neither. */
export function readNumber(name, typed) {
  const { min, max, above, whole } = NUMBERS[name];
  if (typed.trim() === "") return {};
  const value = Number(typed);
  const fits = Number.isFinite(value) && (above ? value > min : value >= min) && value <= max && (!whole || Number.isInteger(value));
  if (fits) return { value };
  const kind = whole ? "a whole number" : "a number";
  const most = whole && max > 1e6 ? `from ${min} up` : `${above ? `above ${min}` : `from ${min}`} up to ${max}`;
  return { problem: `Enter ${kind} ${most}.` };
}

/** Strings that end the answer: one a line, `\n` stands for a line's end. */
export function readStops(typed) {
  const stops = typed
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replaceAll("\\n", "\n"));
  return stops.length > MOST_STOPS ? { problem: `At most ${MOST_STOPS} lines.` } : stops.length ? { value: stops } : {};
}

export const writeStops = (stops) => (stops ?? []).map((stop) => stop.replaceAll("\n", "\\n")).join("\n");

/** Settings out of anything: what is not one is left out. */
export function readSettings(value) {
  const settings = {};
  if (typeof value !== "object" || value === null) return settings;
  for (const name of ["model", "system"]) if (typeof value[name] === "string" && value[name]) settings[name] = value[name];
  for (const name of Object.keys(NUMBERS)) {
    const read = typeof value[name] === "number" ? readNumber(name, String(value[name])) : {};
    if (read.value !== undefined) settings[name] = read.value;
  }
  const isStops = Array.isArray(value.stop) && value.stop.length && value.stop.length <= MOST_STOPS;
  if (isStops && value.stop.every((stop) => typeof stop === "string" && stop)) settings.stop = value.stop;
  return settings;
}
