// The list of conversations, and the sidebar as a drawer on narrow screens.

import { h, iconButton } from "./dom.js";

const NARROW = matchMedia("(max-width: 800px)");

export class Sidebar {
  #element = document.getElementById("sidebar");
  #behind = document.querySelector(".chat");
  #list = document.getElementById("conversations");
  #none = document.getElementById("no-conversations");
  #opener = document.getElementById("open-sidebar");
  #shade = document.getElementById("shade");
  #actions;

  /** `actions`: `open(id)`, `rename(id, title)`, `remove(id)`. */
  constructor(actions) {
    this.#actions = actions;
    this.#opener.addEventListener("click", () => this.toggle(true));
    for (const id of ["shade", "close-sidebar"]) document.getElementById(id).addEventListener("click", () => this.toggle(false));
    this.#element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !NARROW.matches) return;
      event.stopPropagation();
      this.toggle(false);
    });
    NARROW.addEventListener("change", () => this.toggle(false, { focus: false }));
    this.toggle(false, { focus: false });
  }

  toggle(open, { focus = true } = {}) {
    const wasOpen = this.#element.classList.contains("open");
    this.#element.classList.toggle("open", open);
    this.#behind.inert = NARROW.matches && open;
    this.#shade.hidden = !open;
    this.#opener.setAttribute("aria-expanded", String(open));
    if (!focus || !NARROW.matches) return;
    if (open) document.getElementById("close-sidebar").focus();
    else if (wasOpen) this.#opener.focus();
  }

  /** `busy`: ids of the conversations to which an answer is on its way. */
  show(conversations, currentId, busy) {
    // A title that is just being edited is left in peace.
    if (this.#list.querySelector("input")) return;
    const focused = this.#list.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && [focused.closest("li").dataset.id, focused.className];
    this.#list.replaceChildren(...conversations.map((conversation) => this.#row(conversation, currentId, busy)));
    this.#none.hidden = conversations.length > 0;
    if (!place) return;
    const row = [...this.#list.children].find((item) => item.dataset.id === place[0]) ?? this.#list.firstElementChild;
    ([...(row?.querySelectorAll("button") ?? [])].find((button) => button.className === place[1]) ?? row?.querySelector("button"))?.focus();
  }

  #row({ id, title }, currentId, busy) {
    const named = title || "Untitled";
    const current = id === currentId;
    const open = h("button", { type: "button", class: "open", title: named, on: { click: () => this.#actions.open(id) } });
    open.append(h("span", { class: "name" }, named));
    if (busy.has(id)) open.append(h("span", { class: "dot" }), h("span", { class: "visually-hidden" }, ", answering"));
    if (current) open.setAttribute("aria-current", "true");
    return h(
      "li",
      { class: current ? "current" : "", "data-id": id },
      open,
      iconButton("pencil", `Rename “${named}”`, (event) => this.#rename(event.currentTarget.closest("li"), id, named), { class: "quiet rename" }),
      iconButton("trash", `Delete “${named}”`, () => this.#actions.remove(id), { class: "quiet delete" }),
    );
  }

  #rename(row, id, title) {
    const input = h("input", { value: title, maxLength: 200, "aria-label": "Name of the conversation" });
    let left = false;
    const leave = (keep, focus) => {
      if (left) return;
      left = true;
      input.remove();
      this.#actions.rename(id, keep ? input.value.trim() : "");
      if (focus) [...this.#list.children].find((item) => item.dataset.id === id)?.querySelector(".rename").focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) leave(true, true);
      else if (event.key === "Escape") leave(false, true);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    input.addEventListener("blur", () => leave(true, false));
    row.replaceChildren(input);
    input.select();
  }
}
