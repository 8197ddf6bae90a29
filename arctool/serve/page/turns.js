// The turns of the conversation that is shown, and keeping the latest of them in sight.

import { AnswerView } from "./answer.js";
import { shownAnswer } from "./conversation.js";
import { copy, h, iconButton } from "./dom.js";

const NEAR_THE_END = 48;

export class Turns {
  #list;
  #scroller;
  #toEnd;
  #actions;
  #announce;
  #following = true;
  #conversation = null;
  #run = null;
  #views = [];

  /** `actions`: `regenerate()`, `resend(index, text)`, `show(message, which)`. */
  constructor({ list, scroller, toEnd, actions, announce }) {
    this.#list = list;
    this.#scroller = scroller;
    this.#toEnd = toEnd;
    this.#actions = actions;
    this.#announce = announce;
    scroller.addEventListener("scroll", () => this.#seen());
    toEnd.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.#keepUp()).observe(scroller);
    list.addEventListener("click", ({ target }) => {
      const button = target.closest(".copy-code");
      if (button) copy(button.closest(".code").querySelector("code").textContent, button, announce);
    });
  }

  /** Shows a conversation from its end. `run`: the answer to it that is on its way, or null. */
  show(conversation, run) {
    this.#conversation = conversation;
    this.#views = [];
    this.#list.replaceChildren();
    this.sync(run);
    this.follow();
  }

  /** Draws the messages from `from` on anew, and those that are new. */
  sync(run, from = this.#views.length) {
    this.#run = run;
    for (const { element } of this.#views.splice(from)) element.remove();
    const { messages } = this.#conversation;
    for (let index = from; index < messages.length; index += 1) {
      const view = messages[index].role === "user" ? this.#userTurn(index) : this.#assistantTurn(index);
      this.#views.push(view);
      this.#list.append(view.element);
    }
    this.#list.classList.toggle("busy", run !== null);
    this.#keepUp();
  }

  /** A run has ended; returns the view of its answer, or null if it is not on the screen. */
  end(run) {
    const view = this.viewOf(run);
    if (view === null) return null;
    this.#run = null;
    view.end();
    const turn = view.element.closest(".turn");
    turn.setAttribute("aria-busy", "false");
    turn.classList.toggle("nothing", !run.answer.content);
    this.#list.classList.remove("busy");
    this.#keepUp();
    return view;
  }

  /** The view of the answer that a run fills, if it is on the screen. */
  viewOf(run) {
    return this.#views.findLast((view) => view.answer?.run === run)?.answer ?? null;
  }

  follow() {
    this.#following = true;
    this.#keepUp();
  }

  #seen() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    this.#following = scrollHeight - scrollTop - clientHeight < NEAR_THE_END;
    this.#toEnd.hidden = this.#following;
  }

  #keepUp() {
    if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    else this.#seen();
  }

  #userTurn(index) {
    const { content } = this.#conversation.messages[index];
    const text = h("div", { class: "asked" }, content);
    const edit = iconButton("pencil", "Edit and send again", () => this.#edit(element, index));
    const element = h(
      "li",
      { class: "turn user" },
      h("h2", { class: "visually-hidden" }, "You"),
      text,
      h("div", { class: "actions" }, edit, this.#copyButton("Copy message", () => content)),
    );
    return { element };
  }

  #edit(element, index) {
    const before = [...element.childNodes];
    const { content } = this.#conversation.messages[index];
    const area = h("textarea", { value: content, "aria-label": "Edit your message", rows: Math.min(12, content.split("\n").length + 1) });
    const leave = () => {
      element.replaceChildren(...before);
      element.querySelector("button").focus();
    };
    const send = () => {
      if (area.value.trim()) this.#actions.resend(index, area.value.trim());
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      }
    });
    const buttons = h(
      "div",
      { class: "buttons" },
      h("span", { class: "hint" }, "What follows is answered anew."),
      h("button", { type: "button", on: { click: leave } }, "Cancel"),
      h("button", { type: "button", class: "primary", on: { click: send } }, "Send"),
    );
    element.replaceChildren(h("div", { class: "editing" }, area, buttons));
    area.focus();
  }

  #assistantTurn(index) {
    const message = this.#conversation.messages[index];
    const answer = shownAnswer(message);
    const run = this.#run?.answer === answer ? this.#run : null;
    const drawn = () => this.#keepUp();
    const view = new AnswerView(answer, { run, drawn, retry: () => this.#actions.regenerate() });
    // Of use at the last answer only, where the style sheet shows it.
    const again = iconButton("refresh", "Regenerate", () => this.#actions.regenerate(), { class: "quiet regenerate" });
    const actions = h("div", { class: "actions" }, this.#copyButton("Copy answer", () => answer.content), again);
    const element = h(
      "li",
      { class: answer.content || run ? "turn assistant" : "turn assistant nothing", "aria-busy": String(run !== null) },
      h("h2", { class: "visually-hidden" }, "Assistant"),
      view.element,
      h("div", { class: "turn-foot" }, this.#choice(message), view.numbers, actions),
    );
    return { element, answer: view };
  }

  /** Back and forth between the answers that were made to one message. */
  #choice(message) {
    const { answers, shown } = message;
    if (answers.length < 2) return null;
    const to = (which) => () => this.#actions.show(message, which);
    return h(
      "span",
      { class: "choice", role: "group", "aria-label": "Answers" },
      iconButton("left", "Previous answer", to(shown - 1), { disabled: shown === 0 }),
      h("span", {}, `${shown + 1} of ${answers.length}`),
      iconButton("right", "Next answer", to(shown + 1), { disabled: shown === answers.length - 1 }),
    );
  }

  #copyButton(label, text) {
    const button = iconButton("copy", label, () => copy(text(), button, this.#announce));
    return button;
  }
}
