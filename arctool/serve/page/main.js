// The page: one conversation on the screen, a run for each that is being answered, and what every button does.

import { Api } from "./api.js";
import { newAnswer, newConversation, requestBody, shownAnswer, titleOf } from "./conversation.js";
import { KeyDialog, confirmed } from "./dialogs.js";
import { fillIcons } from "./dom.js";
import { Run } from "./run.js";
import { SettingsDrawer } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { StatusView } from "./status.js";
import { Store, browserStorage } from "./store.js";
import { Turns } from "./turns.js";

const by = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const SPOKEN = 2000;
const TICK = 250;

/** Whether Enter only takes a word from an input method; Safari tells by the code alone. */
const isComposing = (event) => event.isComposing || event.keyCode === 229;

class Page {
  store = new Store(browserStorage(), (trouble) => this.notify(trouble));
  runs = new Map();
  models = [];
  drafts = new Map();
  conversation = null;

  keys = new KeyDialog((key) => this.useKey(key));
  api = new Api((why) => this.keys.ask(why ?? "The server asks for a key."));
  settings = new SettingsDrawer((settings) => this.changeSettings(settings));
  turns = new Turns({
    list: by("turns"),
    scroller: by("scroller"),
    toEnd: by("to-end"),
    announce: (text) => this.announce(text),
    actions: {
      regenerate: () => this.answer(),
      resend: (index, text) => this.resend(index, text),
      show: (message, which) => this.showAnswer(message, which),
    },
  });
  sidebar = new Sidebar({
    open: (id) => this.go(id),
    rename: (id, title) => this.rename(id, title),
    remove: (id) => this.remove(id),
  });

  start() {
    this.api.key = this.keys.key;
    this.wireComposer();
    by("new-chat").addEventListener("click", () => this.go(""));
    by("delete-all").addEventListener("click", () => this.removeAll());
    by("change-key").addEventListener("click", () => this.keys.ask("Requests carry it as a bearer token."));
    by("close-notice").addEventListener("click", () => (by("notice").hidden = true));
    by("model").addEventListener("change", () => {
      this.changeSettings({ ...this.conversation.settings, model: this.model });
      this.settings.show(this.conversation.settings);
    });
    for (const button of by("examples").querySelectorAll("button")) {
      button.addEventListener("click", () => this.write(button.textContent));
    }
    for (const radio of document.querySelectorAll("[name=theme]")) {
      radio.checked = radio.value === window.arctoolTheme.read();
      radio.addEventListener("change", () => window.arctoolTheme.choose(radio.value));
    }
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    addEventListener("storage", ({ key }) => this.changedElsewhere(key));
    for (const type of ["beforeunload", "pagehide"]) addEventListener(type, () => this.leave());
    setInterval(() => this.tick(), TICK);
    this.open(location.hash.slice(1));
    this.loadModels();
    this.status = new StatusView(this.api, {
      left: () => this.announce("The server cannot be reached"),
      returned: () => {
        this.announce("The server answers again");
        this.loadModels();
      },
    });
  }

  get run() {
    return this.runs.get(this.conversation) ?? null;
  }

  // ── Writing ──

  wireComposer() {
    const box = by("message");
    box.addEventListener("input", () => this.fitComposer());
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
      event.preventDefault();
      this.submit();
    });
    by("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    by("stop").addEventListener("click", () => this.run?.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.run?.stop();
    });
  }

  fitComposer() {
    const box = by("message");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
    by("send").disabled = !box.value.trim();
  }

  write(text) {
    by("message").value = text;
    this.fitComposer();
    by("message").focus();
  }

  submit() {
    const text = by("message").value.trim();
    if (!text || this.run) return;
    this.write("");
    this.ask(text);
  }

  ask(text) {
    const { conversation } = this;
    conversation.messages.push({ role: "user", content: text });
    conversation.title ||= titleOf(text);
    this.turns.sync(null);
    this.turns.follow();
    this.answer();
  }

  resend(index, text) {
    if (this.run) return;
    this.conversation.messages.length = index;
    this.turns.sync(null, index);
    this.ask(text);
    by("message").focus();
  }

  // ── Answers ──

  /** Has what was asked last answered, or answered anew: the answers before stay within reach, except those that are empty. */
  answer() {
    const { conversation } = this;
    if (this.run) return;
    const answer = newAnswer(this.model);
    const last = conversation.messages.at(-1);
    if (last.role === "assistant") {
      last.answers = [...last.answers.filter(({ content, reasoning }) => content || reasoning), answer];
      last.shown = last.answers.length - 1;
    } else {
      conversation.messages.push({ role: "assistant", answers: [answer], shown: 0 });
    }
    const run = new Run(answer, {
      changed: (kind, text) => this.turns.viewOf(run)?.push(kind, text),
      ended: () => this.ended(conversation, run),
    });
    this.runs.set(conversation, run);
    this.turns.sync(run, conversation.messages.length - 1);
    this.keep(conversation);
    this.showState();
    this.announce("Answering");
    by("message").focus();
    run.go(this.api, async () => {
      if (!this.models.length) this.showModels(await this.api.models());
      answer.model = this.model;
      return requestBody(conversation, this.model);
    });
  }

  ended(conversation, run) {
    this.runs.delete(conversation);
    const view = this.turns.end(run);
    if (this.store.knows(conversation.id)) this.keep(conversation);
    this.showState();
    const { error, finish } = run.answer;
    if (finish === "stopped") this.announce("Stopped");
    else this.announce(error ?? view?.text.slice(0, SPOKEN) ?? `“${conversation.title}” is answered`);
  }

  showAnswer(message, which) {
    if (this.run) return;
    message.shown = which;
    this.keep(this.conversation);
    this.turns.sync(null, this.conversation.messages.indexOf(message));
    this.showState();
  }

  // ── Conversations ──

  /** To a conversation, or with "" to a new one, by way of the address, so that the browser's back button works. */
  go(id) {
    this.sidebar.toggle(false);
    if (id === location.hash.slice(1)) this.open(id);
    else location.hash = id;
    by("message").focus();
  }

  open(id) {
    if (this.conversation) this.drafts.set(this.draftKey, by("message").value);
    this.conversation = this.find(id) ?? newConversation(this.store.defaults);
    this.turns.show(this.conversation, this.run);
    this.settings.show(this.conversation.settings);
    this.write(this.drafts.get(this.draftKey) ?? "");
    this.drafts.delete(this.draftKey);
    this.showModels();
    this.showState();
  }

  /** One that is being answered is only here; any other is read anew, since another tab may have changed it. */
  find(id) {
    return [...this.runs.keys()].find((conversation) => conversation.id === id) ?? this.store.load(id);
  }

  /** What is being written belongs to its conversation; those that have not begun share one. */
  get draftKey() {
    return this.conversation.messages.length ? this.conversation.id : "";
  }

  keep(conversation) {
    conversation.updated = Date.now();
    this.store.save(conversation);
    if (conversation === this.conversation && location.hash.slice(1) !== conversation.id) {
      history.replaceState(null, "", `#${conversation.id}`);
    }
  }

  rename(id, title) {
    const conversation = id === this.conversation.id ? this.conversation : this.find(id);
    if (title && conversation) {
      conversation.title = title;
      this.store.save(conversation);
    }
    this.showState();
  }

  async remove(id) {
    const title = this.store.list().find((conversation) => conversation.id === id)?.title;
    if (!(await confirmed(`Delete “${title}”? It cannot be brought back.`, "Delete"))) return;
    this.store.remove(id);
    for (const [conversation, run] of this.runs) if (conversation.id === id) run.stop();
    if (id === this.conversation.id) this.go("");
    this.showState();
  }

  async removeAll() {
    if (!(await confirmed("Delete all conversations in this browser? They cannot be brought back.", "Delete all"))) return;
    this.settings.close();
    this.store.removeAll();
    this.runs.forEach((run) => run.stop());
    this.go("");
  }

  changedElsewhere(key) {
    if (key !== null && !this.store.refresh(key)) return;
    if (key?.endsWith(this.conversation.id) && !this.run) this.open(this.conversation.id);
    else this.showState();
  }

  // ── Models, settings, key ──

  async loadModels() {
    try {
      this.showModels(await this.api.models());
      this.showContext();
    } catch {
      // The status view says what is wrong with the server; the next message asks for the models anew.
    }
  }

  get model() {
    return this.models.length ? by("model").value : "";
  }

  showModels(models = this.models) {
    this.models = models;
    const { settings } = this.conversation;
    const wanted = this.models.some(({ id }) => id === settings.model) ? settings.model : this.models[0]?.id;
    const select = by("model");
    if (this.models.length) select.replaceChildren(...this.models.map(({ id }) => new Option(id, id, false, id === wanted)));
    select.disabled = this.models.length < 2;
    select.title = wanted ?? "";
  }

  changeSettings(settings) {
    const { conversation } = this;
    conversation.settings = settings;
    this.store.defaults = settings;
    if (conversation.messages.length) this.store.save(conversation);
    this.showState();
  }

  useKey(key) {
    this.api.key = key;
    this.loadModels();
  }

  // ── What is said beside the conversation ──

  showState() {
    const { conversation, run } = this;
    const title = conversation.title || "New chat";
    by("title").textContent = title;
    document.title = conversation.title ? `${title} – arctool` : "arctool";
    by("empty").hidden = conversation.messages.length > 0;
    by("send").hidden = run !== null;
    by("stop").hidden = run === null;
    this.sidebar.show(this.store.list(), conversation.id, new Set([...this.runs.keys()].map(({ id }) => id)));
    by("open-settings").classList.toggle("set", Object.keys(conversation.settings).some((name) => name !== "model"));
    this.showContext();
  }

  showContext() {
    const last = this.conversation.messages.findLast((message) => message.role === "assistant");
    const usage = last && shownAnswer(last).usage;
    const context = this.models.find(({ id }) => id === this.model)?.context;
    const used = usage && usage.prompt !== null && usage.completion !== null ? usage.prompt + usage.completion : null;
    const of = context ? ` of ${whole.format(context)}` : "";
    by("context").textContent = used === null ? "" : `Context: ${whole.format(used)}${of} tokens`;
  }

  /** What is on its way ends here, before the browser breaks the connection, which would look like the server's fault. */
  leave() {
    for (const [conversation, run] of this.runs) {
      run.stop();
      this.store.save(conversation);
    }
  }

  tick() {
    if (this.run) this.turns.viewOf(this.run)?.tick();
  }

  notify(text) {
    by("notice-text").textContent = text;
    by("notice").hidden = false;
  }

  announce(text) {
    by("announcer").textContent = text;
  }
}

fillIcons(document);
new Page().start();
