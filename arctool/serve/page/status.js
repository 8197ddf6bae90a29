// The server's numbers, asked for while somebody looks.

import { rate } from "./answer.js";

const EVERY = 2000;
const PATIENCE = 5000;

const whole = new Intl.NumberFormat("en");
const number = (value) => (Number.isFinite(value) ? value : null);

/** A span of time in its two largest units. */
export function span(seconds) {
  const units = [
    ["d", Math.floor(seconds / 86400)],
    ["h", Math.floor(seconds / 3600) % 24],
    ["min", Math.floor(seconds / 60) % 60],
    ["s", Math.floor(seconds) % 60],
  ];
  const first = units.findIndex(([, value]) => value > 0);
  if (first < 0) return "0 s";
  const shown = units.slice(first, first + 2).filter(([, value]) => value > 0);
  return shown.map(([unit, value]) => `${value} ${unit}`).join(" ");
}

export class StatusView {
  #api;
  #told;
  #timer = null;
  #asking = false;
  #state = "unknown";

  /** `told`: `left()` and `returned()` are called when the server goes and comes. */
  constructor(api, told) {
    this.#api = api;
    this.#told = told;
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  #look() {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible" && !this.#asking) this.#ask();
  }

  async #ask() {
    this.#asking = true;
    try {
      this.#show(await this.#api.status(AbortSignal.timeout(PATIENCE)));
    } catch (error) {
      if (error.status === 401) this.#say("unknown", "Wants a key");
      else this.#say("gone", error.status ? `Status ${error.status}` : "Not reachable");
    }
    this.#asking = false;
    if (document.visibilityState === "visible") this.#timer = setTimeout(() => this.#ask(), EVERY);
  }

  #show(status) {
    const running = number(status?.running);
    this.#say(status?.ready ? (running ? "busy" : "ready") : "loading", status?.ready ? (running ? "Working" : "Ready") : "Loading");
    const set = (name, value, form) => {
      document.getElementById(`status-${name}`).textContent = number(value) === null ? "–" : form(value);
    };
    set("running", status?.running, whole.format);
    set("waiting", status?.waiting, whole.format);
    set("generated", status?.generated_tokens_per_second, rate);
    set("prompt", status?.prompt_tokens_per_second, rate);
    const share = Math.min(Math.max(number(status?.kv_cache_usage) ?? 0, 0), 1) * 100;
    set("cache", status?.kv_cache_usage, () => `${share.toFixed(1)} %`);
    const meter = document.getElementById("cache-meter");
    meter.setAttribute("aria-valuenow", share.toFixed(1));
    meter.setAttribute("aria-valuetext", `${share.toFixed(1)} percent`);
    meter.firstElementChild.style.width = `${share}%`;
    const more = [];
    if (number(status?.requests_finished) !== null) more.push(`${whole.format(status.requests_finished)} answered`);
    if (number(status?.uptime_seconds) !== null) more.push(`up ${span(status.uptime_seconds)}`);
    document.getElementById("status-more").textContent = more.join(" · ");
    document.getElementById("version").textContent = typeof status?.version === "string" ? status.version : "";
  }

  #say(state, words) {
    document.getElementById("server-state").textContent = words;
    document.getElementById("status").dataset.state = state;
    const before = this.#state;
    this.#state = state;
    if (state === "gone" && before !== "gone") this.#told.left();
    if (state !== "gone" && before === "gone") this.#told.returned();
  }
}
