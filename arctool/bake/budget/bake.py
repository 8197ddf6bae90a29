"""A bake to a budget: so many stored bits a weight, spent where the model feels them. Joins measuring, allocation and the plain bake.

A uniform bake at the highest rung that fits (1) says what every layer would look like; what each group of layers costs at that rung is
measured (2), the bits are allocated (3), the mixed model is baked (4), and both are checked on text on which nothing was
decided (5). The better one becomes the artifact (6). Everything that takes long is in a journal: that of the uniform bake, beside the
output's own, keeps what was measured too, and stays until the artifact is whole.

The rate is over all linear layers of the model, scales and signs included; embedding, head and norms have their own types and do not count.
On the disk: what a bake needs (`pipeline`), and the layers of the uniform bake.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from arctool.bake.account import Account, GroupSpent, Tried
from arctool.bake.budget.attempt import Attempt, KeptModel
from arctool.bake.budget.held_out import HeldOut, held_out
from arctool.bake.budget.need import Need, check_bpw
from arctool.bake.budget.sensitivity import Check, Trial, measure
from arctool.bake.calibration.stream import one_thread_per_call
from arctool.bake.calibration.token_set import CalibrationSet
from arctool.bake.choices import LADDER, searched
from arctool.bake.journal import HEADER, Journal, beside
from arctool.bake.pipeline import BakeResult, Progress, Status, bake, check_seed, interruptible
from arctool.bake.place import check_free, made_before
from arctool.bake.provenance import table_digest
from arctool.bake.recipe import RecipeFile
from arctool.bake.source.checkpoint import Checkpoint
from arctool.quant.codebooks import rung
from arctool.run.tokenizer import Tokenizer
from arctool.uqff.container import recover

ALGORITHM = "budget-1"
"""Names how a budget becomes a recipe; to be changed with any change of that."""


@dataclass(frozen=True)
class Outcome:
    """Which attempt becomes the artifact, what the report says of that, how many of its layers were there already."""

    attempt: Attempt
    account: Account
    resumed: int


@dataclass(frozen=True)
class Budgeted:
    """One bake to a budget: what it works on, and whom it tells."""

    checkpoint: Checkpoint
    output: Path
    bpw: float
    need: Need
    text: HeldOut
    seed: int
    jobs: int | None
    calibration: CalibrationSet | None
    progress: Progress | None
    say: Status

    def attempt(self, names: Sequence[str]) -> Attempt:
        return Attempt.of(self.checkpoint, self.need.recipe(names), self.seed, self.calibration)

    def question(self, uniform: Attempt) -> str:
        """SHA-256 (hex) of everything that the answer depends on."""
        tables = {name: table_digest(rung(name)) for name in LADDER if searched(name)}
        facts = [ALGORITHM, self.bpw, self.text.digest, asdict(uniform.info), dict(LADDER), tables]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def decide(self, uniform: Attempt, kept: Journal) -> Outcome:
        """Steps 1 to 5, with the journal of the uniform bake. Deterministic for any number of jobs."""
        need = self.need
        resumed = uniform.fill(kept, self.output, self.jobs, self.progress, self._phase(f"uniform bake at {need.rung}"))
        with ThreadPoolExecutor(self.jobs or os.cpu_count() or 1) as pool, one_thread_per_call():
            stored = KeptModel.of(uniform, kept, pool)
            effects = self._effects(kept, Trial(self.checkpoint, stored, self.text.measured, pool))
            names = need.allocated(effects)
            mixed = self.attempt(names)
            found = {"uniform": math.inf, "mixed": math.inf}
            if names != need.uniform:
                check = Check(self.checkpoint, self.text.checked, pool, self.say)
                found["uniform"] = self._checked(kept, uniform, check, stored, "the uniform bake")
                with mixed.journal(self.output) as journal, interruptible(journal, mixed.tasks):
                    mixed.share_sampled(kept, journal)
                    there = mixed.fill(journal, self.output, self.jobs, self.progress, self._phase("mixed bake"))
                    found["mixed"] = self._checked(kept, mixed, check, KeptModel.of(mixed, journal, pool), "the mixed bake")
        better = found["mixed"] < found["uniform"]
        account = self._account(uniform, names, effects, found, better)
        return Outcome(mixed, account, there) if better else Outcome(uniform, account, resumed)

    def _effects(self, kept: Journal, trial: Trial) -> list[float]:
        """What each group costs, measured, or from the journal as far as it was."""
        name = f"effects-{self._text_key()}"
        known = np.full(len(self.need.groups), np.nan)
        kept.load_array(name, known)
        found = measure(trial, self.need.groups, known, lambda effects: kept.store_array(name, 0, effects), self.say)
        return [float(effect) for effect in found]

    def _checked(self, kept: Journal, attempt: Attempt, check: Check, stored: KeptModel, title: str) -> float:
        """The divergence of an attempt on the checking text, measured, or from the journal of the uniform bake."""
        recipe = hashlib.sha256(json.dumps(attempt.recipe.to_json(), sort_keys=True).encode()).hexdigest()
        name = f"check-{self._text_key()}-{recipe[:16]}"
        known = np.empty(1)
        if kept.load_array(name, known) is None:
            known[0] = check.divergence(stored, title)
            kept.store_array(name, 0, known)
        return float(known[0])

    def _text_key(self) -> str:
        return hashlib.sha256(f"{ALGORITHM} {self.text.digest}".encode()).hexdigest()[:16]

    def _phase(self, name: str) -> Status:
        return lambda what: self.say(f"{name}: {what}")

    def _account(
        self, uniform: Attempt, names: Sequence[str], effects: Sequence[float], found: Mapping[str, float], better: bool
    ) -> Account:
        """The same for any number of jobs and after any interruption."""
        need, text = self.need, self.text
        return Account(
            algorithm=ALGORITHM,
            question=self.question(uniform),
            asked=self.bpw,
            chosen="mixed" if better else "uniform",
            rung=need.rung,
            uniform=Tried(need.rate(need.uniform), _plain(found["uniform"])),
            mixed=Tried(need.rate(names), _plain(found["mixed"])),
            text_sha256=text.digest,
            measured_tokens=sum(map(len, text.measured)),
            checked_tokens=sum(map(len, text.checked)) if names != need.uniform else 0,
            groups=tuple(
                GroupSpent(group.keys, group.weights, effect, name) for group, effect, name in zip(need.groups, effects, names, strict=True)
            ),
        )


def bake_to_budget(
    checkpoint: Checkpoint,
    output: Path,
    bpw: float,
    *,
    pins: RecipeFile | None = None,
    text: HeldOut | None = None,
    seed: int = 0,
    jobs: int | None = None,
    overwrite: bool = False,
    calibration: CalibrationSet | None = None,
    measured: bool | None = None,
    progress: Progress | None = None,
    status: Status | None = None,
) -> BakeResult:
    """Write the artifact `output` with at most `bpw` stored bits a weight of the linear layers, spent where they pay.

    `pins`: what a recipe's rules say is not allocated; `text`: what to measure and to check on, None for the text that ships; the rest as
    in `pipeline.bake`. The artifact's recipe names each layer that differs from its default, its report's `budget` says why; where the
    mixed model does no better on the checking text, the uniform one is the artifact. Raises as `pipeline.bake`.
    """
    began = time.monotonic()
    output = Path(os.path.abspath(output))
    check_bpw(bpw)
    check_seed(seed)
    need = Need.of(checkpoint.specs, checkpoint.config.num_layers, pins or RecipeFile(), bpw)
    text = text or held_out(Tokenizer(checkpoint.assets, checkpoint.config.vocab_size), checkpoint.config.max_position_embeddings)
    job = Budgeted(checkpoint, output, bpw, need, text, seed, jobs, calibration, progress, status or (lambda _: None))
    uniform = job.attempt(need.uniform)
    kept = uniform.journal(beside(output))
    recover(output)
    question = job.question(uniform)
    before = None if overwrite else made_before(output, lambda info: (info.budget or {}).get("question") == question)
    if before is not None:
        kept.discard()
        uniform.journal(output).discard()
        return BakeResult(output, before, len(uniform.tasks), time.monotonic() - began, checkpoint.ignored)
    check_free(output, overwrite)
    with kept:
        with interruptible(kept, uniform.tasks):
            outcome = job.decide(uniform, kept)
            if outcome.attempt is uniform:
                hand_over(kept, uniform.journal(output))
            result = bake(
                checkpoint,
                output,
                outcome.attempt.recipe,
                seed=seed,
                jobs=jobs,
                overwrite=overwrite,
                calibration=calibration,
                measured=measured,
                budget=outcome.account.to_json(),
                status=status,
            )
        kept.remove()
    return replace(result, resumed=outcome.resumed, seconds=time.monotonic() - began)


def hand_over(kept: Journal, journal: Journal) -> None:
    """Give the layers in `kept` to the journal of the same bake at another output: linked, so that both have them."""
    with journal:
        for item in kept.directory.iterdir():
            if item.name != HEADER:
                with contextlib.suppress(OSError):  # what is not handed over is made again
                    os.link(item, journal.directory / item.name)


def _plain(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None
