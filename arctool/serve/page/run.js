// One answer on its way: asks the server and fills the answer's fields as it comes in.

import { ApiError } from "./api.js";

/** Seconds; what arrived within fewer came in one piece and says nothing of speed. */
const SHORTEST = 0.05;

export class Run {
  #stop = new AbortController();
  #started = performance.now();
  #changed;
  #ended;

  /**
   * `changed(kind, text)` is called for every piece of text, "content" or "reasoning"; `ended()` once, whatever happens.
   */
  constructor(answer, { changed, ended }) {
    this.answer = answer;
    this.#changed = changed;
    this.#ended = ended;
  }

  get seconds() {
    return (performance.now() - this.#started) / 1000;
  }

  /** `body`: makes the request's body; where it fails, the answer does. */
  async go(api, body) {
    const { answer } = this;
    try {
      for await (const part of api.chat(await body(), this.#stop.signal)) this.#take(part);
    } catch (error) {
      if (error.name === "AbortError") {
        answer.finish = "stopped";
      } else {
        answer.finish = "error";
        answer.error = error instanceof ApiError ? sentence(error) : `The page has failed: ${error.message}`;
      }
    }
    answer.finish ??= "stopped";
    this.#endThought();
    this.#ended();
  }

  /** Ends the answer where it is. The connection is closed, by which the server knows. */
  stop() {
    this.#stop.abort();
  }

  #take({ text, reasoning, finish, usage }) {
    const { answer } = this;
    if (finish) answer.finish = finish;
    if (usage) {
      answer.usage = {
        prompt: usage.prompt_tokens ?? null,
        cached: usage.prompt_tokens_details?.cached_tokens ?? null,
        completion: usage.completion_tokens ?? null,
      };
    }
    const piece = reasoning ?? text;
    if (piece === undefined) return;
    answer.lastToken = this.seconds;
    answer.firstToken ??= answer.lastToken;
    answer.pieces += 1;
    if (reasoning === undefined) this.#endThought();
    const kind = reasoning === undefined ? "content" : "reasoning";
    answer[kind] += piece;
    this.#changed(kind, piece);
  }

  #endThought() {
    const { answer } = this;
    if (answer.reasoning && answer.thought === null) answer.thought = this.seconds - answer.firstToken;
  }
}

function sentence({ message, status, retryAfter }) {
  if (status === 503 && retryAfter) return `${message} Try again in ${retryAfter} s.`;
  return message;
}

/**
 * The numbers of an answer. `rate`: tokens a second between the first and the last; it and the count are estimates (of pieces, each of
 * them at least one token) as long as the server has not told its own count.
 */
export function numbers(answer) {
  const told = answer.usage?.completion ?? null;
  const tokens = told ?? answer.pieces;
  const seconds = answer.firstToken === null ? 0 : answer.lastToken - answer.firstToken;
  return {
    tokens,
    estimated: told === null,
    rate: tokens > 1 && seconds >= SHORTEST ? (tokens - 1) / seconds : null,
    firstToken: answer.firstToken,
    prompt: answer.usage?.prompt ?? null,
    cached: answer.usage?.cached ?? null,
  };
}
