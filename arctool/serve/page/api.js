// The server as the page sees it. Addresses are relative, so that the page also works below a path of a proxy.

import { events } from "./sse.js";

export class ApiError extends Error {
  constructor(message, { status = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export class Api {
  /** `unauthorized` is called whenever the server asks for a key, or for another one. */
  constructor(unauthorized) {
    this.key = "";
    this.unauthorized = unauthorized;
  }

  async models() {
    const answer = await this.#json("v1/models");
    const models = Array.isArray(answer?.data) ? answer.data.filter((model) => typeof model?.id === "string") : [];
    if (!models.length) throw new ApiError("The server has no model.");
    return models.map((model) => ({ id: model.id, context: Number.isInteger(model.max_model_len) ? model.max_model_len : null }));
  }

  async status(signal) {
    return this.#json("status", { signal, quiet: true });
  }

  /** Yields `{text}`, `{reasoning}`, `{finish}` and `{usage}` as they arrive. Raises ApiError, or AbortError once `signal` fired. */
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify(body),
      signal,
    });
    if (!(response.headers.get("Content-Type") ?? "").startsWith("text/event-stream")) {
      throw new ApiError("What answered is not this server: no event stream.");
    }
    const stream = events(response.body);
    let finished = false;
    let whole = false;
    try {
      for (let next = await stream.next(); !next.done; next = await stream.next()) {
        whole = next.value === "[DONE]";
        if (whole) return;
        const chunk = parsed(next.value);
        if (chunk.error) throw new ApiError(messageOf(chunk) ?? "The server broke the answer off.");
        const choice = chunk.choices?.[0];
        if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
        if (choice?.delta?.content) yield { text: choice.delta.content };
        if (choice?.finish_reason) {
          finished = true;
          yield { finish: choice.finish_reason };
        }
        if (chunk.usage) yield { usage: chunk.usage };
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError("The connection broke before the answer was complete.");
    } finally {
      // After the last event the stream is read to its end: to cancel it would look to the server like a client that left.
      (whole ? stream.next() : stream.return()).catch(() => {});
    }
    if (!finished) throw new ApiError("The connection ended before the answer was complete.");
  }

  async #json(path, options = {}) {
    const response = await this.#fetch(path, options);
    try {
      return await response.json();
    } catch {
      throw new ApiError(`What the server sent for /${path} is not JSON.`);
    }
  }

  /** `quiet`: nobody is asked for a key. */
  async #fetch(path, { quiet = false, ...options }) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (response.ok) return response;
    const told = await response.json().then(messageOf, () => null);
    if (response.status === 401 && !quiet) this.unauthorized(told);
    const retryAfter = Number(response.headers.get("Retry-After")) || null;
    throw new ApiError(told ?? `The server answered with status ${response.status}.`, { status: response.status, retryAfter });
  }
}

function parsed(data) {
  try {
    return JSON.parse(data) ?? {};
  } catch {
    throw new ApiError("The server sent an event that is not JSON.");
  }
}

/** The message of an error body, or null if it has none. */
function messageOf(body) {
  const message = body?.error?.message ?? body?.error ?? body?.detail;
  return typeof message === "string" && message ? message : null;
}
