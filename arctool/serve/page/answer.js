// One answer on the screen: reasoning, text, error, numbers.

import { h, icon } from "./dom.js";
import { StreamingMarkdown, rendered } from "./markdown.js";
import { numbers } from "./run.js";

const count = new Intl.NumberFormat("en");

/** Seconds for a reader: 0.12 s, 3.4 s, 75 s. */
export const seconds = (value) => `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : value.toFixed(0)} s`;

export const tokens = (value) => `${count.format(value)} ${value === 1 ? "token" : "tokens"}`;

export const rate = (value) => `${value > 0 && value < 10 ? value.toFixed(1) : count.format(Math.round(value))} tok/s`;

const ENDINGS = {
  length: "Ended at the limit of tokens.",
  stopped: "Stopped.",
  abort: "Ended by the server.",
  content_filter: "Ended by the server’s filter.",
};

export class AnswerView {
  #answer;
  #body = h("div", { class: "prose" });
  #thoughts = h("div", { class: "prose" });
  #summary = h("span", {}, "Thinking…");
  #reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, icon("right"), this.#summary), this.#thoughts);
  #waiting = h("p", { class: "waiting" }, h("span", { class: "dot" }), h("span", { class: "visually-hidden" }, "Waiting for the first token"));
  #ending = h("p", { class: "ending", hidden: true });
  #error = h("div", { class: "error", hidden: true });
  #streams = {};

  /** `run`: the answer is still on its way. `drawn` is called after each change; `retry` by the button beside an error. */
  constructor(answer, { run = null, drawn, retry }) {
    this.#answer = answer;
    this.run = run;
    this.numbers = h("span", { class: "numbers-told" });
    this.#error.append(icon("alert"), h("p", {}), h("button", { type: "button", class: "retry", on: { click: retry } }, "Try again"));
    this.element = h("div", { class: "answer" }, this.#reasoning, this.#body, this.#waiting, this.#ending, this.#error);
    if (run) {
      this.#streams = { content: new StreamingMarkdown(this.#body, drawn), reasoning: new StreamingMarkdown(this.#thoughts, drawn) };
      for (const kind of ["reasoning", "content"]) if (answer[kind]) this.push(kind, answer[kind]);
      this.tick();
    } else {
      this.#body.append(rendered(answer.content));
      this.#thoughts.append(rendered(answer.reasoning));
      this.#settle();
    }
  }

  get text() {
    return this.#body.textContent;
  }

  push(kind, text) {
    this.#waiting.hidden = this.#answer.content !== "";
    if (kind === "reasoning") this.#reasoning.hidden = false;
    this.#streams[kind].push(text);
  }

  /** What time alone changes. */
  tick() {
    const { rate: perSecond, tokens: so_far } = numbers(this.#answer);
    const parts = [seconds(this.run.seconds)];
    if (so_far) parts.push(`≈ ${tokens(so_far)}`);
    if (perSecond) parts.push(`≈ ${rate(perSecond)}`);
    this.numbers.textContent = parts.join(" · ");
  }

  end() {
    this.run = null;
    this.#streams.reasoning.finish(this.#answer.reasoning);
    this.#streams.content.finish(this.#answer.content);
    this.#settle();
  }

  #settle() {
    const { content, reasoning, thought, finish, error } = this.#answer;
    this.#waiting.hidden = true;
    this.#reasoning.hidden = !reasoning;
    this.#summary.textContent = `Thought for ${thought === null || thought < 1 ? "a moment" : seconds(thought)}`;
    const ending = ENDINGS[finish] ?? (content || error ? "" : "The answer is empty.");
    this.#ending.textContent = ending;
    this.#ending.hidden = !ending;
    this.#error.hidden = !error;
    this.#error.querySelector("p").textContent = error ?? "";
    this.#tellNumbers();
  }

  #tellNumbers() {
    const told = numbers(this.#answer);
    const about = told.estimated ? "≈ " : "";
    const parts = [];
    if (told.tokens) parts.push(about + tokens(told.tokens));
    if (told.rate !== null) parts.push(about + rate(told.rate));
    if (told.firstToken !== null) parts.push(`first token ${seconds(told.firstToken)}`);
    if (told.prompt !== null) {
      parts.push(`prompt ${count.format(told.prompt)}${told.cached ? ` (${count.format(told.cached)} cached)` : ""}`);
    }
    this.numbers.textContent = parts.join(" · ");
  }
}
