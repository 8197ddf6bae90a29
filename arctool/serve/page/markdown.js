// From a model's Markdown to elements. What a model writes is never trusted, and three walls stand before it: raw HTML is shown
// as the text that it is, DOMPurify lets only the tags below through, and the page's Content-Security-Policy runs no inline script.

import { h, icon } from "./dom.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const TAGS = "a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" ");
const LANGUAGE = /^language-[\w+#.-]{1,40}$/;

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    // The page's own headings are of levels 1 and 2.
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    html({ text, block }) {
      if (/^<br\s*\/?>$/i.test(text)) return "<br>";
      return block ? `<p>${escaped(text.trimEnd()).replaceAll("\n", "<br>")}</p>\n` : escaped(text);
    },
    // To load a picture would tell its host who reads this: it becomes a link.
    image({ href, text }) {
      return `<a href="${escaped(href)}">Image: ${escaped(text || href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A" && node.hasAttribute("href")) {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.hasAttribute("class") && !(node.nodeName === "CODE" && LANGUAGE.test(node.className))) node.removeAttribute("class");
});

/** A fragment with what is harmless in `html`. Links lead to http, https and mailto only, and open elsewhere. */
export function sanitized(html) {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "title", "align", "start", "class"],
    ADD_URI_SAFE_ATTR: ["align", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

/** Code gets a head with its language and a button that copies it; code and tables may be scrolled by keyboard. */
function furnished(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = pre.firstElementChild?.className.replace("language-", "") ?? "";
    const block = h("div", { class: "code" });
    pre.replaceWith(block);
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    const button = h("button", { type: "button", class: "quiet copy-code", title: "Copy code", "aria-label": "Copy code" }, icon("copy"));
    block.append(h("div", { class: "code-head" }, h("span", {}, language), button), pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** The elements of a whole text. */
export function rendered(text) {
  return furnished(sanitized(marked.parse(text)));
}

// A fence at the start of a line, with its whole first line.
const OPENING = /^(`{3,}|~{3,})[^\n]*\n/;

/**
 * A text that is still being written, drawn at most once a frame. Blocks that no further character can change are drawn once and left
 * alone; only the last block is drawn anew, and a code block grows by what is new in it. So the work is linear in the text, but for a
 * single very long list or table, whose redrawing is held to a tenth of the time.
 */
export class StreamingMarkdown {
  #root;
  #drawn;
  #held = "";
  #tail = "";
  #tailNodes = [];
  #fence = null;
  #frame = null;
  #notBefore = 0;

  /** `drawn` is called after each change of `root`. */
  constructor(root, drawn = () => {}) {
    this.#root = root;
    this.#drawn = drawn;
  }

  push(text) {
    // A carriage return at the end may be half of a line's end.
    const whole = this.#held + text;
    this.#held = whole.endsWith("\r") ? "\r" : "";
    this.#tail += whole.slice(0, whole.length - this.#held.length).replace(/\r\n?/g, "\n");
    this.#frame ??= requestAnimationFrame(() => this.#onFrame());
  }

  /** The text is complete. It is drawn as a whole once more, since a link may refer to an address at its end. */
  finish(text) {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const whole = rendered(text);
    const shown = document.createElement("div");
    shown.append(whole);
    // What is already there stays, and with it the reader's selection.
    if (shown.innerHTML !== this.#root.innerHTML) this.#root.replaceChildren(...shown.childNodes);
    this.#drawn();
  }

  #onFrame() {
    this.#frame = null;
    const start = performance.now();
    if (start < this.#notBefore) {
      this.#frame = requestAnimationFrame(() => this.#onFrame());
      return;
    }
    this.draw();
    const cost = performance.now() - start;
    this.#notBefore = cost > 4 ? start + 10 * cost : 0;
  }

  draw() {
    if (this.#fence === null || this.#growCode()) this.#drawTail();
    this.#drawn();
  }

  #drawTail() {
    const tokens = marked.lexer(this.#tail);
    const last = tokens.findLastIndex((token) => token.type !== "space");
    if (last < 0) return;
    const raw = (list) => list.reduce((length, token) => length + token.raw.length, 0);
    const before = raw(tokens.slice(0, last));
    // What a block is, and so that the one before has ended, is known once its first line is complete.
    const settles = last > 0 && this.#tail.indexOf("\n", before) >= 0 && raw(tokens) === this.#tail.length;
    this.#replaceTail(this.#nodes(tokens, 0, settles ? last : tokens.length));
    if (settles) {
      this.#tail = this.#tail.slice(before);
      this.#tailNodes = this.#nodes(tokens, last, tokens.length);
      this.#root.append(...this.#tailNodes);
    }
    if (settles || last === 0) this.#openFence(tokens[last]);
  }

  /** The elements of some of `tokens`, which carry with them where their links lead. */
  #nodes(tokens, from, to) {
    const some = tokens.slice(from, to);
    some.links = tokens.links;
    return [...furnished(sanitized(marked.parser(some))).childNodes];
  }

  #replaceTail(nodes) {
    for (const node of this.#tailNodes) node.remove();
    this.#root.append(...nodes);
    this.#tailNodes = nodes;
  }

  /** If the tail is a code block that has begun, it is from now on appended to, line by line, until the fence that closes it. */
  #openFence(token) {
    const opening = OPENING.exec(this.#tail);
    if (token.type !== "code" || !opening) return;
    const code = this.#tailNodes.find((node) => node.nodeType === Node.ELEMENT_NODE).querySelector("code");
    const mark = opening[1];
    const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
    const lines = this.#tail.slice(opening[0].length).split("\n");
    if (lines.some((line) => closing.test(line))) return;
    const text = document.createTextNode("");
    code.replaceChildren(text);
    this.#fence = { text, closing, mark: mark[0], shown: 0 };
    this.#tail = this.#tail.slice(opening[0].length);
    this.#growCode();
  }

  /** Takes the complete lines of the tail into the open code block; returns whether it was closed. */
  #growCode() {
    const fence = this.#fence;
    for (let end = this.#tail.indexOf("\n"); end >= 0; end = this.#tail.indexOf("\n")) {
      const line = this.#tail.slice(0, end);
      if (fence.closing.test(line)) {
        this.#tail = this.#tail.slice(end + 1);
        this.#fence = null;
        this.#tailNodes = [];
        return true;
      }
      fence.text.appendData(`${line.slice(fence.shown)}\n`);
      fence.shown = 0;
      this.#tail = this.#tail.slice(end + 1);
    }
    // A line that may still become the closing fence is not shown.
    if (!this.#tail.trim().split("").every((sign) => sign === fence.mark)) {
      fence.text.appendData(this.#tail.slice(fence.shown));
      fence.shown = this.#tail.length;
    }
    return false;
  }
}
