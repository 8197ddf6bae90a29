"""What /v1/models and the first lines of a server tell about its model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from arctool.run.llm import LLM
from arctool.serve.service import ModelFacts
from arctool.uqff.discovery import is_artifact
from arctool.uqff.inspect import inspect


def facts_of(llm: LLM, source: Path, name: str) -> ModelFacts:
    """Facts of a loaded model; of an artifact also how its layers are stored. Raises what `uqff.inspect` raises."""
    plan = llm.runner.plan
    formats: dict[str, int] = {}
    bits = None
    if is_artifact(source):
        found = inspect(source)
        formats = dict(Counter(row.label for row in found.layers))
        bits = found.totals.quantised_bits_per_weight
    return ModelFacts(
        name=name,
        max_model_len=llm.engine.max_model_len,
        bits_per_weight=None if bits is None else round(bits, 3),
        formats=formats,
        kv_dtype=str(plan.dtype).removeprefix("torch."),
        kv_tokens=plan.num_blocks * plan.block_size,
    )
