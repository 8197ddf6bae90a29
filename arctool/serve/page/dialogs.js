// Two questions that the page asks: whether something may be deleted, and for the server's key.

import { browserStorage } from "./store.js";

/** Whether the reader agrees. */
export function confirmed(question, verb) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-text").textContent = question;
  document.getElementById("confirm-yes").textContent = verb;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

const KEY = "arctool.key";

/** The key to the server: kept for this tab, or in the browser if the reader wants that. */
export class KeyDialog {
  #dialog = document.getElementById("key");
  #text = document.getElementById("key-text");
  #why = document.getElementById("key-why");
  #remember = document.getElementById("key-remember");
  #kept = [browserStorage("sessionStorage"), browserStorage()];

  /** `use(key)` is called with a key that was given. */
  constructor(use) {
    this.#dialog.querySelector("form").addEventListener("submit", () => {
      const key = this.#text.value.trim();
      this.#text.value = "";
      this.#keep(key);
      use(key);
    });
    document.getElementById("key-cancel").addEventListener("click", () => this.#dialog.close());
  }

  /** The key that was given before, or "". */
  get key() {
    return this.#kept.map((area) => quietly(() => area?.getItem(KEY))).find(Boolean) ?? "";
  }

  ask(why) {
    this.#why.textContent = why;
    if (this.#dialog.open) return;
    this.#remember.checked = Boolean(quietly(() => this.#kept[1]?.getItem(KEY)));
    this.#dialog.showModal();
    this.#text.focus();
  }

  #keep(key) {
    for (const area of this.#kept) quietly(() => area?.removeItem(KEY));
    quietly(() => this.#kept[this.#remember.checked ? 1 : 0]?.setItem(KEY, key));
  }
}

function quietly(action) {
  try {
    return action();
  } catch {
    return null;
  }
}
