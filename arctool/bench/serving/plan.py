"""What a measurement of a server is to do: workload, lengths, load. Checked here, by option, before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from arctool.bench.serving.exchange import Endpoint
from arctool.errors import UsageError

LARGEST = 1 << 20
"""No length, number of requests or of clients is larger."""

CLIENTS = "1,4,16"
"""The closed loops that are measured where no load is asked for."""

MIXED = {"random": 0.7, "json": 0.2, "cancel": 0.1}
"""Shares of the mixed workload, in which `cancel_share` has no say."""


class Workload(Enum):
    """What is asked. `docs/bench-serve.md` says what each is like."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    JSON = "json"
    CANCEL = "cancel"
    MIXED = "mixed"


@dataclass(frozen=True)
class Load:
    """A closed loop of `clients`, each of which sends when its last answer is whole; or an open loop of `rate` requests a second, whose
    gaps are gamma distributed with shape `burstiness` (1 is Poisson), of which at most `cap` are under way at once."""

    clients: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    cap: int | None = None

    @property
    def label(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients > 1 else ''}"
        return f"{self.rate:g} req/s"


@dataclass(frozen=True)
class Plan:
    """A measurement. Lengths in tokens; `requests` of each load; `goodput`: milliseconds that a good request may take, by metric."""

    loads: tuple[Load, ...]
    workload: Workload = Workload.RANDOM
    endpoint: Endpoint = Endpoint.COMPLETIONS
    input_len: int = 128
    output_len: int = 64
    requests: int = 64
    warmups: int = 1
    temperature: float = 0.0
    natural: bool = False
    """The model ends its answers itself: `output_len` is then the most, not the length of all."""
    prefixes: int = 4
    prefix_len: int = 256
    turns: int = 4
    cancel_share: float = 0.1
    cancel_after: int = 8
    goodput: tuple[tuple[str, float], ...] = ()
    percentiles: tuple[float, ...] = (50, 90, 99)
    max_failed: float = 0.0
    """Share of failed requests up to which a row still has figures, of those that succeeded."""
    count_chunks: bool = False

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefixes", 1), ("prefix_len", 1), ("turns", 1), ("cancel_after", 1)):
            _whole(getattr(self, name), least, f"--{name.replace('_', '-')}")
        _whole(self.requests, 1, "--num-prompts")
        _whole(self.warmups, 0, "--num-warmups")
        for name in ("cancel_share", "max_failed"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected a share from 0 to below 1, found {getattr(self, name)}")
        if not 0 <= self.temperature <= 2:
            raise UsageError(f"--temperature: expected 0 to 2, found {self.temperature}")
        if not self.percentiles or not all(0 < one < 100 for one in self.percentiles):
            raise UsageError(f"--percentiles: expected numbers between 0 and 100, found {list(self.percentiles)}")
        if self.workload is Workload.MULTI_TURN and self.requests % self.turns:
            raise UsageError(f"--num-prompts: {self.requests} requests are no whole conversations of {self.turns} turns (--turns)")
        if self.cancels and self.cancel_after >= self.output_len:
            raise UsageError(
                f"--cancel-after: an answer of {self.output_len} tokens is over before it could be cancelled at {self.cancel_after}"
            )
        if 0 in self.kinds().values():
            raise UsageError(f"--num-prompts: {self.requests} are too few to have all kinds of the {self.workload.value} workload")
        if not self.loads:
            raise UsageError("--concurrency: expected at least one number of clients")
        for load in self.loads:
            self._check(load)

    @property
    def cancels(self) -> bool:
        return self.workload in (Workload.CANCEL, Workload.MIXED)

    @property
    def has_json(self) -> bool:
        return self.workload in (Workload.JSON, Workload.MIXED)

    @property
    def streams(self) -> int:
        """How many requests could be under way at once."""
        return self.requests // self.turns if self.workload is Workload.MULTI_TURN else self.requests

    def kinds(self) -> dict[str, int]:
        """How many requests of each kind there are, to the whole request."""
        cancel = self.cancel_share
        shares = {
            Workload.JSON: {"json": 1.0},
            Workload.CANCEL: {"random": 1 - cancel, "cancel": cancel},
            Workload.MIXED: MIXED,
        }.get(self.workload, {"random": 1.0})
        edges = [round(sum(list(shares.values())[:at]) * self.requests) for at in range(len(shares) + 1)]
        return {name: edges[at + 1] - edges[at] for at, name in enumerate(shares)}

    def _check(self, load: Load) -> None:
        if load.clients is not None:
            _whole(load.clients, 1, "--concurrency")
            if load.clients > self.streams:
                what = "conversations" if self.workload is Workload.MULTI_TURN else "requests"
                raise UsageError(f"--num-prompts: {self.streams} {what} cannot keep {load.clients} clients busy")
        elif load.rate is None or not load.rate > 0:
            raise UsageError(f"--request-rate: expected more than 0 requests a second, found {load.rate}")
        if not (load.burstiness > 0 and math.isfinite(load.burstiness)):
            raise UsageError(f"--burstiness: expected more than 0, found {load.burstiness}")
        if load.cap is not None:
            _whole(load.cap, 1, "--max-concurrency")


def _whole(value: int, least: int, option: str) -> None:
    if not least <= value <= LARGEST:
        raise UsageError(f"{option}: expected {least} to {LARGEST}, found {value}")


def parse_loads(concurrency: str | None, rate: str | None, burstiness: float = 1.0, cap: int | None = None) -> tuple[Load, ...]:
    """The loads of the options --concurrency or --request-rate, lists with commas. Raises UsageError."""
    if rate is None:
        if burstiness != 1 or cap is not None:
            raise UsageError("--burstiness and --max-concurrency: belong to an open loop; give a --request-rate")
        numbers = parse_floats(CLIENTS if concurrency is None else concurrency, "--concurrency")
        if not all(number.is_integer() for number in numbers):
            raise UsageError(f"--concurrency: expected whole numbers of clients, found {concurrency!r:.60}")
        return tuple(Load(clients=int(number)) for number in numbers)
    if concurrency is not None:
        raise UsageError("--request-rate: a load is either closed (--concurrency) or open (--request-rate)")
    return tuple(Load(rate=number, burstiness=burstiness, cap=cap) for number in parse_floats(rate, "--request-rate"))


def parse_floats(text: str, option: str) -> tuple[float, ...]:
    """Numbers with commas between them, each once. Raises UsageError by option."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option}: expected numbers with commas between them, found {text!r:.60}") from error
    if len(set(found)) != len(found):
        raise UsageError(f"{option}: {text!r:.60} has a number twice")
    return found


def parse_goodput(text: str) -> tuple[tuple[str, float], ...]:
    """`ttft:200 tpot:50` (spaces or commas between) as pairs of metric and milliseconds. Raises UsageError."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition(":")
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if name not in ("ttft", "tpot", "e2el") or not most > 0 or name in found:
            raise UsageError(f"--goodput: expected milliseconds like ttft:200 tpot:50 e2el:5000, each once, found {part!r:.40}")
        found[name] = most
    return tuple(found.items())
