"""A module that stands in for llama-cpp-python: structures and calls as documented in llama.h; its engine is ours, its files F32 or Q4_0.

It keeps its context from call to call unless it is reset, as the real one does, and reads an importance matrix through the pointers.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from tiny_gguf import write_gguf

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.kernels.registry import default_registry
from arctool.run.evaluate import logits
from arctool.run.weights import load_model


class ImatrixData(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


class QuantizeParams(ctypes.Structure):
    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("imatrix", ctypes.POINTER(ImatrixData)),
    )


@dataclass
class StandIn:
    """What the module was asked. `code`: what the quantiser returns; `writes`: whether it leaves a file; `shift`: of the first logit."""

    checkpoint: Path
    code: int = 0
    writes: bool = True
    shift: float = 0.0
    quantised: list[tuple[int, int, bool]] = field(default_factory=list)
    imatrix: dict[str, list[float]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    open: int = 0
    listeners: list[Any] = field(default_factory=list)

    def say(self, text: str) -> None:
        for listener in self.listeners:
            listener(2, text.encode(), None)

    def module(self) -> ModuleType:
        """The module, for sys.modules."""
        made: Any = ModuleType("llama_cpp")
        made.__version__ = "0.0.stand-in"
        made.GGML_TYPE_F32 = 0
        made.LLAMA_FTYPE_MOSTLY_F16, made.LLAMA_FTYPE_MOSTLY_Q2_K, made.LLAMA_FTYPE_MOSTLY_Q4_K_M = 1, 10, 15
        made.LLAMA_FTYPE_MOSTLY_Q3_K_M = 12
        made.llama_model_imatrix_data = ImatrixData
        made.llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        made.llama_log_set = lambda listener, _: self.listeners.append(listener)
        made.llama_print_system_info = lambda: b" AVX = 1 | "
        made.llama_model_quantize_default_params = lambda: QuantizeParams(0, 9, False)
        made.llama_model_quantize = self._quantise
        made.Llama = lambda path, **options: Llama(self, path, options)
        return made

    def _quantise(self, source: bytes, target: bytes, params: Any) -> int:
        given = ctypes.cast(params, ctypes.POINTER(QuantizeParams)).contents
        self.quantised.append((given.ftype, given.nthread, given.allow_requantize))
        self.imatrix = {}
        for at in range(1000):
            if not given.imatrix or given.imatrix[at].name is None:
                break
            entry = given.imatrix[at]
            self.imatrix[entry.name.decode()] = entry.data[: entry.size]
        self.say("quantising\n")
        if self.code:
            self.say("failed to quantize:\n no such luck\n")
        elif self.writes and given.ftype == 1:
            shutil.copyfile(source, target)
        elif self.writes:
            write_gguf(self.checkpoint, Path(target.decode()), "llama", tensor_type=GGMLQuantizationType.Q4_0)
        return self.code


class Llama:
    """The engine of `llama_cpp.Llama`, as far as it is used."""

    def __init__(self, stand_in: StandIn, path: str, options: dict[str, Any]) -> None:
        if Path(path).read_bytes()[:4] != b"GGUF":
            raise ValueError(f"Failed to load model from file: {path}")
        stand_in.options = options
        stand_in.open += 1
        self._stand_in = stand_in
        with open_checkpoint(path) as checkpoint:
            self._model = load_model(checkpoint, default_registry())
        self._context: list[int] = []
        self.scores = np.full((options["n_ctx"], self._model.config.vocab_size), np.nan, np.float32)

    def reset(self) -> None:
        self._context = []

    def eval(self, tokens: Sequence[int]) -> None:
        first = len(self._context)
        self._context += tokens
        self.scores[first : len(self._context)] = logits(self._model, self._context)[first:]
        self.scores[first : len(self._context), 0] += self._stand_in.shift

    def close(self) -> None:
        self._stand_in.open -= 1
