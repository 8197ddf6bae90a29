"""The workloads: what is asked, request by request, made ready before the clock runs. A `Script` is one client's work: it yields a request,
receives its outcome and yields the next one, so that a conversation can go on with what was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arctool.bench.serving.dialect import Dialect, Prompt
from arctool.bench.serving.exchange import Ask, Endpoint, Outcome
from arctool.bench.serving.plan import Plan, Workload
from arctool.bench.serving.prompts import SLACK, Source, Words
from arctool.errors import UsageError

Script = Generator[Ask, Outcome, None]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "pear"]},
        "ripe": {"type": "boolean"},
        "grams": {"enum": [5, 50, 100, 150, 200, 500]},
    },
    "required": ["name", "ripe", "grams"],
    "additionalProperties": False,
}
"""Of a JSON answer: everything in it is bounded, so that a model of any size comes to its end."""

DESCRIBE = "Describe a fruit as JSON: its name, whether it is ripe, its weight in grams."


@dataclass(frozen=True)
class Voice:
    """How to speak to this server. `dialect`, `source`: of the plan's endpoint; `chat`: of the chat endpoint, where the plan needs it."""

    dialect: Dialect
    source: Source
    chat: Dialect | None = None

    @property
    def forces_length(self) -> bool:
        return self.dialect.forces_length


def scripts(plan: Plan, voice: Voice, random: np.random.Generator) -> list[Script]:
    """The plan's requests, as scripts that may run in any order. Raises UsageError where the lengths leave no room for a prompt."""
    room = plan.input_len - (0 if plan.workload is Workload.SHARED_PREFIX else voice.source.overhead)
    if room < 1:
        raise UsageError(f"--input-len: the server itself adds {voice.source.overhead} tokens to each prompt; expected more than that")
    if plan.workload is Workload.MULTI_TURN:
        return [conversation(plan, voice, random) for _ in range(plan.requests // plan.turns)]
    if plan.workload is Workload.SHARED_PREFIX:
        return [_once(ask) for ask in _shared(plan, voice, random)]
    make: dict[str, Callable[[], Ask]] = {
        "random": lambda: _random(plan, voice, random),
        "cancel": lambda: replace(_random(plan, voice, random), kind="cancel", cancel_after=plan.cancel_after),
        "json": lambda: _json(plan, voice, random),
    }
    return [_once(make[kind]()) for kind in kinds(plan, random)]


def warm_ups(plan: Plan, voice: Voice, random: np.random.Generator) -> list[Script]:
    """Requests of the same lengths that nobody counts."""
    make = _json if plan.workload is Workload.JSON else _random
    return [_once(replace(make(plan, voice, random), prompt_tokens=None)) for _ in range(plan.warmups)]


def kinds(plan: Plan, random: np.random.Generator) -> list[str]:
    """The kind of each request, in random order."""
    found = [kind for kind, count in plan.kinds().items() for _ in range(count)]
    return [found[at] for at in random.permutation(len(found))]


def _once(ask: Ask) -> Script:
    yield ask


def _ask(plan: Plan, voice: Voice, kind: str, prompt: Prompt, tokens: int | None) -> Ask:
    """A request of the plan's endpoint; `tokens`: that its prompt has, all told."""
    return Ask(
        kind,
        voice.dialect.endpoint,
        voice.dialect.body(prompt, plan.output_len, natural=plan.natural),
        prompt_tokens=tokens,
        slack=0 if tokens is None else _slack(voice.source, tokens),
        output_tokens=None if plan.natural or not voice.forces_length else plan.output_len,
    )


def _slack(source: Source, tokens: int) -> int:
    share = SLACK[source.known]
    return 0 if share == 0 else max(1, round(share * tokens))


def _random(plan: Plan, voice: Voice, random: np.random.Generator) -> Ask:
    prompt = voice.source.join([voice.source.make(random, max(1, plan.input_len - voice.source.overhead))])
    return _ask(plan, voice, "random", prompt, plan.input_len)


def _shared(plan: Plan, voice: Voice, random: np.random.Generator) -> list[Ask]:
    """Suffixes of `input_len` behind each prefix, the server's overhead before it; the prefixes take turns."""
    source = voice.source
    if plan.prefix_len <= source.overhead:
        raise UsageError(f"--prefix-len: the server itself adds {source.overhead} tokens to each prompt; expected more than that")
    prefixes = [source.make(random, plan.prefix_len - source.overhead) for _ in range(plan.prefixes)]
    prompts = [source.join([prefixes[at % plan.prefixes], source.make(random, plan.input_len)]) for at in range(plan.requests)]
    return [_ask(plan, voice, "shared-prefix", prompt, plan.prefix_len + plan.input_len) for prompt in prompts]


def _json(plan: Plan, voice: Voice, random: np.random.Generator) -> Ask:
    """An answer that its schema ends, always through the chat endpoint. The length of its prompt is about the wanted one."""
    assert voice.chat is not None, "a plan with JSON has a chat dialect"
    # What differs stands first, so that no prefix is met again.
    prompt = f"{Words().make(random, max(1, plan.input_len - len(DESCRIBE.split())))}. {DESCRIBE}"
    body = voice.chat.body(prompt, plan.output_len, natural=True, schema=SCHEMA)
    return Ask("json", Endpoint.CHAT, body, required=tuple(SCHEMA["required"]), keeps_text=True)


def conversation(plan: Plan, voice: Voice, random: np.random.Generator) -> Script:
    """Turns that each append what was answered; as messages of a chat, or as one growing text. Ends early with a failed turn."""
    chats = voice.dialect.endpoint is Endpoint.CHAT
    says = [voice.source.make(random, plan.input_len - (voice.source.overhead if turn == 0 else 0)) for turn in range(plan.turns)]
    return _turns(plan, voice, says, chats)


def _turns(plan: Plan, voice: Voice, says: list[str], chats: bool) -> Script:
    messages: list[dict[str, str]] = []
    text, floor = "", 0
    for turn, words in enumerate(says):
        messages.append({"role": "user", "content": words})
        text = f"{text}\n{words}" if text else words
        ask = _ask(plan, voice, f"turn {turn + 1}", list(messages) if chats else text, plan.input_len if turn == 0 else None)
        outcome = yield replace(ask, prompt_floor=floor, keeps_text=True)
        if outcome.failure is not None:
            return
        messages.append({"role": "assistant", "content": outcome.text})
        text += outcome.text
        floor = 0 if outcome.prompt_tokens is None else outcome.prompt_tokens + plan.input_len // 2
