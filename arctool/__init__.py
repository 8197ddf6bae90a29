"""arctool: bake a checkpoint to a 2-4 bit trellis artifact, prove it bit by bit, and run it.

from arctool import LLM, SamplingParams, bake_model, evaluate, verify

bake_model("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-qtip4", "qtip4")
assert verify("SmolLM2-135M-Instruct-qtip4").passed
print(evaluate("SmolLM2-135M-Instruct-qtip4", against="HuggingFaceTB/SmolLM2-135M-Instruct").rows[0].comparison)
llm = LLM("SmolLM2-135M-Instruct-qtip4")
print(llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arctool.api import bake_model, evaluate
    from arctool.artifacts import diff, inspect, inspect_tensor, verify
    from arctool.run.async_engine import AsyncEngine
    from arctool.run.llm import LLM
    from arctool.run.sampling.constraint import Constraint
    from arctool.run.sampling.params import SamplingParams

# Before torch is loaded: its OpenMP threads spin for work by default, and on shared cores a token then takes forty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "Constraint",
    "SamplingParams",
    "__version__",
    "bake_model",
    "diff",
    "evaluate",
    "inspect",
    "inspect_tensor",
    "verify",
]

_PUBLIC = {
    "LLM": "arctool.run.llm",
    "AsyncEngine": "arctool.run.async_engine",
    "Constraint": "arctool.run.sampling.constraint",
    "SamplingParams": "arctool.run.sampling.params",
    "bake_model": "arctool.api",
    "evaluate": "arctool.api",
    "diff": "arctool.artifacts",
    "inspect": "arctool.artifacts",
    "inspect_tensor": "arctool.artifacts",
    "verify": "arctool.artifacts",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for: torch takes seconds, and `arctool --help` must not wait for it."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'arctool' has no attribute {name!r}")
