"""How good is what was just baked? The sealed files and the unquantised source read the same text, before the artifact appears.

Of a model that a machine can hold unquantised, and while its source is at hand: whoever gets the artifact later has neither. Knows two
sources of weights and a text, not how anything was quantised.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

from arctool.bake.calibration.token_set import SELF_WEIGHTS
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import SourceError, VerificationError
from arctool.kernels.registry import default_registry
from arctool.run.divergence import compare, reference
from arctool.run.llm import ArtifactSource
from arctool.run.models.spec import Role
from arctool.run.reading import Reading, built_in_reading, built_in_text
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer
from arctool.run.weights import load_model
from arctool.uqff.container import Quality, open_artifact

WINDOWS = 2
"""Of the text, of up to 1024 tokens each: enough to tell 2 bits from 3, quick beside any bake. `arctool eval` measures with more."""

DIGITS = 6
"""Significant digits that are kept. One machine gives the same bits for any number of threads; two with other vector units need not."""

NOT_ASKED = "it was asked not to (--no-measure)"
NOT_CALIBRATED = "a bake without calibration measures only when it is asked to (--measure)"
TOO_LARGE = f"the unquantised model has more than {SELF_WEIGHTS:,} weights, too many to run it here unasked"

Say = Callable[[str], None]


def plan_measurement(checkpoint: Checkpoint, wanted: bool | None, calibrated: bool) -> Reading | str:
    """What both models will read, or why they will not. `wanted` None: what is calibrated is measured.

    Raises SourceError for a tokenizer that cannot cut the text, RequestError for one that leaves nothing of it.
    """
    if wanted is False:
        return NOT_ASKED
    if wanted is None and not calibrated:
        return NOT_CALIBRATED
    if sum(math.prod(spec.shape) for spec in checkpoint.specs if spec.role is not Role.BIAS) > SELF_WEIGHTS:
        return TOO_LARGE
    if TOKENIZER_FILE not in checkpoint.assets:
        raise SourceError(f"{checkpoint.origin}: no {TOKENIZER_FILE}, so there is nothing to measure it with; bake with --no-measure")
    tokenizer = Tokenizer(checkpoint.assets, checkpoint.config.vocab_size)
    return built_in_reading(tokenizer, checkpoint.config.max_position_embeddings, WINDOWS)


def measure(checkpoint: Checkpoint, place: Path, reading: Reading, say: Say) -> Quality | str:
    """The artifact that lies in `place` against its source, or why that gives no numbers. Raises the errors of loading both.

    Memory: one model after the other, and the source's head; no file is written.
    """
    registry = default_registry()

    def step(who: str) -> Callable[[int, int], None]:
        return lambda done, total: say(f"measuring: {who} has read {done} of {total} tokens")

    try:
        base = reference(load_model(checkpoint, registry), reading.windows, step("the source"))
        with open_artifact(place) as artifact:
            found = compare(base, load_model(ArtifactSource(artifact), registry), reading.windows, step("the artifact"))
    except VerificationError as error:
        return str(error)
    numbers = (found.perplexity, found.base_perplexity, found.kl, found.kl_p99, found.same_top1)
    return Quality(
        reading.name,
        hashlib.sha256(built_in_text().encode()).hexdigest(),
        reading.digest,
        reading.window,
        reading.tokens,
        reading.predicted,
        *(rounded(number) for number in numbers),
    )


def rounded(number: float) -> float:
    """`number` to `DIGITS` significant digits."""
    return float(f"{number:.{DIGITS}g}")
