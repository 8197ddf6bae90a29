// The drawer with a conversation's settings. A value counts as soon as it is typed; one that is wrong is said to be and not taken.

import { h } from "./dom.js";
import { NUMBERS, readNumber, readStops, writeStops } from "./fields.js";

export class SettingsDrawer {
  #dialog = document.getElementById("settings");
  #system = document.getElementById("setting-system");
  #stop = document.getElementById("setting-stop");
  #stopHint = document.getElementById("hint-stop");
  #stopWords = [...this.#stopHint.childNodes];
  #inputs = {};
  #settings = {};
  #changed;

  /** `changed(settings)` is called with new settings whenever one was changed. */
  constructor(changed) {
    this.#changed = changed;
    const place = document.getElementById("numbers");
    for (const [name, about] of Object.entries(NUMBERS)) place.append(this.#numberField(name, about));
    this.#system.addEventListener("input", () => this.#take("system", this.#system.value.trim() || undefined));
    this.#stop.addEventListener("input", () => {
      const { value, problem } = readStops(this.#stop.value);
      this.#mark(this.#stop, this.#stopHint, problem);
      this.#stopHint.replaceChildren(...(problem ? [problem] : this.#stopWords));
      this.#take("stop", value);
    });
    document.getElementById("open-settings").addEventListener("click", () => this.#dialog.showModal());
    document.getElementById("reset-settings").addEventListener("click", () => {
      const { model } = this.#settings;
      this.show(model ? { model } : {});
      this.#changed(this.#settings);
      this.#system.focus();
    });
    // A click beside the drawer is one on the dialog itself.
    this.#dialog.addEventListener("click", ({ target }) => target === this.#dialog && this.#dialog.close());
  }

  close() {
    this.#dialog.close();
  }

  show(settings) {
    this.#settings = { ...settings };
    this.#system.value = settings.system ?? "";
    this.#stop.value = writeStops(settings.stop);
    for (const [name, { input, hint }] of Object.entries(this.#inputs)) {
      input.value = settings[name] ?? "";
      hint.textContent = NUMBERS[name].hint;
      this.#mark(input, hint, null);
    }
  }

  #numberField(name, { label, hint: words, min, max, step }) {
    const hint = h("p", { class: "hint", id: `hint-${name}` }, words);
    // Not of type "number": such a field tells no difference between nothing and nonsense, and a wheel changes it by accident.
    const input = h("input", { id: `setting-${name}`, inputMode: "decimal", autocomplete: "off", "aria-describedby": hint.id, placeholder: "default" });
    input.addEventListener("input", () => {
      const { value, problem } = readNumber(name, input.value);
      hint.textContent = problem ?? words;
      this.#mark(input, hint, problem);
      this.#take(name, value);
    });
    input.addEventListener("keydown", (event) => {
      const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!way) return;
      event.preventDefault();
      const now = readNumber(name, input.value).value ?? min;
      const next = Math.min(Math.max(now + way * step, min), max);
      input.value = String(Number(next.toFixed(6)));
      input.dispatchEvent(new Event("input"));
    });
    this.#inputs[name] = { input, hint };
    return h("div", { class: "field" }, h("label", { htmlFor: input.id }, label), input, hint);
  }

  #mark(input, hint, problem) {
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    hint.classList.toggle("problem", Boolean(problem));
  }

  #take(name, value) {
    const settings = { ...this.#settings };
    if (value === undefined) delete settings[name];
    else settings[name] = value;
    this.#settings = settings;
    this.#changed(settings);
  }
}
