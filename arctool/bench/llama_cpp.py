"""The peer: llama.cpp, by way of llama-cpp-python where that is installed. Its quantiser makes a file, its engine reads tokens.

Neither is a dependency of ours: the module is looked for when a measurement asks for it, and passed along. What crosses this room are
files, token ids and logits, so that `run.divergence` holds the peer's models to the same windows and the same base as ours.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.bake.source.gguf_file import read_gguf
from arctool.bake.source.gguf_source import LAYER_NAMES
from arctool.errors import SourceError, StorageError, UsageError

MODULE = "llama_cpp"
FILE_TYPE = "LLAMA_FTYPE_MOSTLY_"
BLOCK = "blk."
"""Begins the names of the decoder's tensors. llama.cpp's own tool gathers importance for these and for no other."""

THEIR_NAMES = {ours: theirs for theirs, ours in LAYER_NAMES.items()}

WORDS, QUOTED = 32, 200
"""Log lines that are kept, and characters of them that a message quotes."""

CHUNK = 256
"""Rows of logits that are handed over at a time."""

Importance = Mapping[str, NDArray[np.float32]]
"""The mean square of every input channel, f32 [in], by the name of the tensor in the GGUF file."""


@dataclass(frozen=True)
class Peer:
    """The loaded module. `threads`: of its quantiser and of its engine; `words`: the last lines that it logged; `listener`: what hears
    them, which must live as long as the module may log."""

    module: Any
    threads: int
    words: deque[str]
    listener: Any

    @property
    def last_words(self) -> str:
        """What it said in the end, on one line."""
        return " ".join("".join(self.words).split())[-QUOTED:].strip() or "nothing"

    @property
    def version(self) -> str:
        return str(getattr(self.module, "__version__", "unknown"))

    @property
    def system(self) -> str:
        """What its build uses of this machine, in its own words."""
        return str(self.module.llama_print_system_info().decode("utf-8", "replace")).strip()


@dataclass(frozen=True)
class PeerModel:
    """A model in the peer's engine: a `run.divergence.Predictor`, with keys and values in f32. `ran` counts the tokens that it read."""

    llama: Any
    ran: Counter[str] = field(default_factory=Counter)

    def __call__(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Logits f32 [≤ CHUNK, vocab] after every one of `ids`, from an empty context. Good until the next call."""
        self.llama.reset()
        self.llama.eval(list(ids))
        self.ran["llama.cpp.tokens"] += len(ids)
        for first in range(0, len(ids), CHUNK):
            yield self.llama.scores[first : min(first + CHUNK, len(ids))]


def find_peer(threads: int | None = None) -> Peer | str:
    """The peer, or why it is not here."""
    try:
        module = importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError) as error:  # the last two where its library cannot be loaded
        return f"{type(error).__name__}: {error}"
    words: deque[str] = deque(maxlen=WORDS)
    listener = module.llama_log_callback(lambda level, text, _: words.append(text.decode("utf-8", "replace")))
    module.llama_log_set(listener, ctypes.c_void_p(0))
    return Peer(module, threads or os.cpu_count() or 1, words, listener)


def gguf_name(key: str) -> str:
    """The name in a GGUF file of the weight of decoder module `key`: model.layers.3.mlp.up_proj → blk.3.ffn_up.weight.

    Raises UsageError for the parts of a mixture of experts, which llama.cpp stacks.
    """
    layer, module = key.removeprefix("model.layers.").split(".", 1)
    if module not in THEIR_NAMES:
        raise UsageError(
            f"{key}: mixtures of experts are not compared with llama.cpp here: it keeps experts, and what is known of them, in stacks"
        )
    return f"{BLOCK}{layer}.{THEIR_NAMES[module]}.weight"


def requantise(peer: Peer, source: Path, target: Path, file_type: str, importance: Importance | None = None) -> None:
    """Let the peer's quantiser make `target` of the GGUF file `source`; `file_type` as it names them: Q2_K, Q4_K_M, Q8_0 ...

    Raises UsageError for a type that this build does not know, SourceError where `importance` lacks a tensor (the quantiser would go
    on without it, silently) and where the quantiser fails, StorageError where it leaves no file.
    """
    number = getattr(peer.module, FILE_TYPE + file_type, None)
    if number is None:
        raise UsageError(f"{file_type}: no file type of llama.cpp {peer.version}; expected one like Q2_K, Q3_K_M, Q4_K_M, Q8_0")
    params = peer.module.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = number, peer.threads, True
    if importance is not None:
        check_importance(source, importance)
        entries = importance_entries(peer.module, importance)
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(peer.module.llama_model_imatrix_data))
    code = peer.module.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code != 0:
        raise SourceError(f"{source}: llama.cpp's quantiser failed at {file_type} with code {code}; it said: {peer.last_words}")
    if not target.is_file():
        raise StorageError(f"{target}: llama.cpp's quantiser reported success and left no file")


def check_importance(source: Path, importance: Importance) -> None:
    """Raise SourceError unless every matrix of the decoder in `source` has its importance, one finite number an input."""
    matrices = {name: t.shape for name, t in read_gguf(source).tensors.items() if name.startswith(BLOCK) and len(t.shape) == 2}
    for name, shape in matrices.items():
        found = importance.get(name)
        if found is None:
            raise SourceError(f"{source}: {name}: no importance was measured for it; the checkpoint is another model than this file")
        if found.shape != shape[1:] or not np.isfinite(found).all():
            raise SourceError(f"{source}: {name}: expected the importance of {shape[1]} inputs, found {list(found.shape)}, or not finite")


def importance_entries(module: Any, importance: Importance) -> Any:
    """The C array that the quantiser reads: name, values, count; ended by an entry without a name. It keeps alive what it points to."""
    entries = (module.llama_model_imatrix_data * (len(importance) + 1))()
    kept = []
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        numbers = (ctypes.c_float * values.size)(*values.tolist())
        kept.append(numbers)
        entry.name, entry.data, entry.size = name.encode(), ctypes.cast(numbers, ctypes.POINTER(ctypes.c_float)), values.size
    entries.kept = kept
    return entries


@contextmanager
def opened(peer: Peer, path: Path, context: int) -> Iterator[PeerModel]:
    """Load a GGUF file into the peer's engine, for windows of up to `context` tokens. Raises SourceError where it cannot be loaded."""
    f32 = peer.module.GGML_TYPE_F32
    options = {"n_ctx": context, "logits_all": True, "n_threads": peer.threads, "n_threads_batch": peer.threads, "verbose": False}
    try:
        llama = peer.module.Llama(str(path), type_k=f32, type_v=f32, **options)
    except (ValueError, RuntimeError) as error:
        raise SourceError(f"{path}: llama.cpp cannot load it: {error}; it said: {peer.last_words}") from error
    try:
        yield PeerModel(llama)
    finally:
        llama.close()
