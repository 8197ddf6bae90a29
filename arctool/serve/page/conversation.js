// What a conversation is, made new or out of anything that a storage holds, and the request for its next answer.
//
// Messages are `{role: "user", content}` and `{role: "assistant", answers, shown}`: every answer that was ever made to what was asked,
// of which one is shown, and only that one is told to the model.

import { readSettings } from "./fields.js";

export function newConversation(settings) {
  // Not crypto.randomUUID: a page that came over plain HTTP from another machine has none.
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), settings: { ...settings }, messages: [] };
}

export function newAnswer(model) {
  return {
    content: "",
    reasoning: "",
    model,
    finish: null,
    error: null,
    pieces: 0,
    usage: null,
    firstToken: null,
    lastToken: null,
    thought: null,
  };
}

export const shownAnswer = (message) => message.answers[message.shown];

/** A title out of what was first asked: the beginning of its first line. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  if (line.length <= 60) return line;
  return `${line.slice(0, 60).replace(/[\s,;:.]+\S*$/, "")}…`;
}

/** The body of a request for the next answer of a conversation. Only settings that are set are in it. */
export function requestBody({ settings, messages }, model) {
  const { system, model: _, ...sampling } = settings;
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns(messages)],
    stream: true,
    stream_options: { include_usage: true },
    ...sampling,
  };
}

/** Many templates want user and assistant to take turns: what was asked twice because nothing came back is asked in one message. */
function turns(messages) {
  const taken = [];
  for (const message of messages) {
    const content = message.role === "user" ? message.content : shownAnswer(message).content;
    if (!content) continue;
    if (taken.at(-1)?.role === message.role) taken.at(-1).content += `\n\n${content}`;
    else taken.push({ role: message.role, content });
  }
  return taken;
}

/** A conversation out of anything that was stored, or null if it is none. */
export function readConversation(id, value) {
  if (!isObject(value) || !Array.isArray(value.messages)) return null;
  const messages = value.messages.map(readMessage);
  if (messages.includes(null)) return null;
  return { id, title: textOf(value.title), updated: numberOf(value.updated) ?? 0, settings: readSettings(value.settings), messages };
}

function readMessage(value) {
  if (value?.role === "user" && typeof value.content === "string") return { role: "user", content: value.content };
  if (value?.role !== "assistant" || !Array.isArray(value.answers) || !value.answers.length || !value.answers.every(isObject)) return null;
  const answers = value.answers.map(readAnswer);
  const shown = Number.isInteger(value.shown) && value.shown >= 0 && value.shown < answers.length ? value.shown : answers.length - 1;
  return { role: "assistant", answers, shown };
}

function readAnswer(value) {
  const usage = isObject(value.usage)
    ? { prompt: numberOf(value.usage.prompt), cached: numberOf(value.usage.cached), completion: numberOf(value.usage.completion) }
    : null;
  return {
    content: textOf(value.content),
    reasoning: textOf(value.reasoning),
    model: textOf(value.model),
    // An answer that was under way when its page was closed.
    finish: textOf(value.finish) || "stopped",
    error: textOf(value.error) || null,
    pieces: numberOf(value.pieces) ?? 0,
    usage,
    firstToken: numberOf(value.firstToken),
    lastToken: numberOf(value.lastToken),
    thought: numberOf(value.thought),
  };
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const textOf = (value) => (typeof value === "string" ? value : "");
const numberOf = (value) => (Number.isFinite(value) && value >= 0 ? value : null);
