// What is kept in the browser: each conversation under a key of its own, so that one that is damaged, or changed in another tab, harms
// no other. Storage may be full, blocked, or hold anything: what is read is rebuilt field by field.

import { readConversation } from "./conversation.js";
import { readSettings } from "./fields.js";

const PREFIX = "arctool.conversation.";
const ID = /^\w+$/;
const DEFAULTS = "arctool.settings";

export class Store {
  #area;
  #trouble;
  #memory = new Map();
  #known = new Map();

  /** `area`: as localStorage, or null. `trouble` is called with a sentence whenever something could not be kept. */
  constructor(area, trouble) {
    this.#area = area;
    this.#trouble = trouble;
    for (const key of this.#keys()) this.refresh(key);
  }

  /** Whether a storage key is a conversation's; what another tab changed under it is read anew. */
  refresh(key) {
    if (!key?.startsWith(PREFIX)) return false;
    const conversation = this.load(key.slice(PREFIX.length));
    if (conversation) this.#know(conversation);
    else this.#known.delete(key.slice(PREFIX.length));
    return true;
  }

  knows(id) {
    return this.#known.has(id);
  }

  /** `{id, title, updated}` of every conversation that can be read, the newest first. */
  list() {
    return [...this.#known.values()].sort((a, b) => b.updated - a.updated);
  }

  load(id) {
    if (!ID.test(id)) return null;
    return this.#memory.get(id) ?? readConversation(id, parsed(this.#read(PREFIX + id)));
  }

  save(conversation) {
    this.#know(conversation);
    if (this.#write(PREFIX + conversation.id, JSON.stringify(conversation))) this.#memory.delete(conversation.id);
    else this.#memory.set(conversation.id, conversation);
  }

  remove(id) {
    this.#memory.delete(id);
    this.#known.delete(id);
    this.#erase(PREFIX + id);
  }

  /** Every conversation, those too that cannot be read. */
  removeAll() {
    for (const key of this.#keys()) this.#erase(key);
    this.#memory.clear();
    this.#known.clear();
  }

  /** The settings that a new conversation starts with. */
  get defaults() {
    return readSettings(parsed(this.#read(DEFAULTS)));
  }

  set defaults(settings) {
    this.#write(DEFAULTS, JSON.stringify(settings));
  }

  #know({ id, title, updated }) {
    this.#known.set(id, { id, title, updated });
  }

  #keys() {
    try {
      return Object.keys(this.#area ?? {}).filter((key) => key.startsWith(PREFIX));
    } catch {
      return [];
    }
  }

  #read(key) {
    try {
      return this.#area?.getItem(key) ?? null;
    } catch {
      return null;
    }
  }

  #write(key, text) {
    try {
      if (this.#area === null) throw new Error("blocked");
      this.#area.setItem(key, text);
      return true;
    } catch {
      const why = this.#area === null ? "does not let this page keep anything" : "has no more room for this page; delete old conversations";
      this.#trouble(`The browser ${why}. What you write now is lost when the page is closed.`);
      return false;
    }
  }

  #erase(key) {
    try {
      this.#area?.removeItem(key);
    } catch {
      // A storage that refuses to forget is not in our hands.
    }
  }
}

/** localStorage, or null where the browser blocks it. */
export function browserStorage(name = "localStorage") {
  try {
    return window[name];
  } catch {
    return null;
  }
}

function parsed(text) {
  try {
    return text === null ? null : JSON.parse(text);
  } catch {
    return null;
  }
}
