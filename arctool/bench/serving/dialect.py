"""What a server understands: which model it has, which optional fields it takes. Asked with small requests before anything is measured.

A field that a server refuses is left out from then on, and the result says so; one that it takes and ignores shows in the lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arctool.bench.serving.client import Client
from arctool.bench.serving.exchange import Ask, Endpoint, Outcome
from arctool.errors import RequestError, UsageError

OPTIONAL = ("stream_options", "ignore_eos", "min_tokens")
"""Fields that not every OpenAI server takes, in the order in which they are tried."""

LENGTHS = frozenset({"ignore_eos", "min_tokens"})
"""Either of them forces the length of an answer."""

HOPELESS = (None, 401, 403, 404, 429, 503)
"""What is not about a field of the request; None is no answer at all."""

PROBE_TOKENS = 2

Prompt = str | list[int] | list[dict[str, str]]
"""Text, token ids, or the messages of a chat."""


@dataclass(frozen=True)
class Dialect:
    """How to write a request for one endpoint of a server."""

    endpoint: Endpoint
    model: str
    temperature: float = 0.0
    fields: frozenset[str] = frozenset(OPTIONAL)

    @property
    def forces_length(self) -> bool:
        return bool(self.fields & LENGTHS)

    def body(self, prompt: Prompt, tokens: int, *, natural: bool = False, schema: Mapping[str, Any] | None = None) -> bytes:
        """The JSON of a streaming request for `tokens` tokens; `natural`: at most so many. `schema`: what the answer must be like."""
        value: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "temperature": self.temperature, "stream": True}
        if self.endpoint is Endpoint.CHAT:
            value["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            value["prompt"] = prompt
        if "stream_options" in self.fields:
            value["stream_options"] = {"include_usage": True}
        if not natural:
            value |= {"ignore_eos": True} if "ignore_eos" in self.fields else {}
            value |= {"min_tokens": tokens} if "min_tokens" in self.fields else {}
        if schema is not None:
            value["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        return json.dumps(value, separators=(",", ":")).encode()


async def find_model(client: Client) -> str:
    """The one model that the server has. Raises RequestError where it does not say, UsageError where there are several."""
    status, body = await client.get("/v1/models")
    if status != 200:
        raise RequestError(f"{client.url}: {no_answer(status, body)}")
    try:
        names = [str(one["id"]) for one in json.loads(body)["data"]]
    except (ValueError, TypeError, LookupError) as error:
        raise RequestError(f"{client.url}/v1/models: not the answer of an OpenAI server; name the model with --model") from error
    if len(names) != 1:
        raise UsageError(f"--model: the server has {len(names)} models; name one: {', '.join(names)[:300]}")
    return names[0]


def no_answer(status: int | None, said: bytes | str) -> str:
    """What a server that cannot be used at all said, with the remedy where we know one."""
    if status is None:
        return f"{said if isinstance(said, str) else said.decode('utf-8', 'replace')}; is the server running there?"
    if status in (401, 403):
        return f"HTTP {status}: the server wants a key (--api-key or OPENAI_API_KEY)"
    return f"/v1/models: HTTP {status}; if this is an OpenAI server, name its model with --model"


async def learn(client: Client, endpoint: Endpoint, model: str, temperature: float, optional: Sequence[str] = OPTIONAL) -> Dialect:
    """The dialect of an endpoint: all optional fields at once, or one by one where that is refused. Raises RequestError."""
    whole = Dialect(endpoint, model, temperature, frozenset(optional))
    outcome = await probe(client, whole, "Hello", PROBE_TOKENS)
    if outcome.failure is None:
        return whole
    if outcome.status in HOPELESS:
        raise refusal(client, endpoint, outcome)
    known = Dialect(endpoint, model, temperature, frozenset())
    bare = await probe(client, known, "Hello", PROBE_TOKENS)
    if bare.failure is not None:
        raise refusal(client, endpoint, bare)
    for name in optional:
        more = Dialect(endpoint, model, temperature, known.fields | {name})
        if (await probe(client, more, "Hello", PROBE_TOKENS)).failure is None:
            known = more
    return known


async def probe(client: Client, dialect: Dialect, prompt: Prompt, tokens: int, schema: Mapping[str, Any] | None = None) -> Outcome:
    """One small request; never measured."""
    body = dialect.body(prompt, tokens, natural=schema is not None, schema=schema)
    return await client.ask(Ask("probe", dialect.endpoint, body, keeps_text=True))


def refusal(client: Client, endpoint: Endpoint, outcome: Outcome) -> RequestError:
    """The error of a server that serves no request at all."""
    if outcome.status is None or outcome.status in (401, 403):
        return RequestError(f"{client.url}: {no_answer(outcome.status, outcome.failure or '')}")
    return RequestError(f"{client.url}{endpoint.path}: {outcome.failure}")
