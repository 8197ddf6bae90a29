"""Reading rows of an embedding of every kind: the bits of the oracle's dense matrix, and nothing decoded but the rows asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from arctool.errors import GeometryError
from arctool.kernels.registry import Registry, default_registry, embedding_name
from arctool.quant.codebooks import RUNGS
from arctool.quant.ggml import Q8_0
from arctool.quant.hadamard import Rotation
from arctool.quant.tensor import DenseTensor, GgmlTensor, TrellisTensor, Weight
from arctool.quant.trellis import pack_symbols

VOCABULARY, HIDDEN = 96, 192


def trellis(name: str, rotation: Rotation | None) -> TrellisTensor:
    rung, generator = RUNGS[name], np.random.default_rng(0)
    symbols = generator.integers(0, 1 << rung.geometry.k, (VOCABULARY, HIDDEN // rung.geometry.v))
    scales = generator.uniform(-2, 2, VOCABULARY).astype(np.float32)
    return TrellisTensor(rung.geometry, rung.codebook(), HIDDEN, pack_symbols(symbols, rung.geometry), scales, rotation)


def unmixed() -> Rotation:
    return Rotation.seeded(3, "model.embed_tokens", VOCABULARY, HIDDEN, mix_rows=False)


def matrix() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)


TABLES: dict[str, tuple[Weight, str]] = {
    "f32": (DenseTensor(matrix()), "dense-f32"),
    "bf16": (DenseTensor((matrix().view(np.uint32) >> 16).astype(np.uint16)), "dense-bf16"),
    "q8_0": (GgmlTensor.encoded(Q8_0, matrix(), "w"), "ggml-q8_0"),
    "qtip4b": (trellis("qtip4b", unmixed()), "trellis-sum2"),
    "qtip2-v4": (trellis("qtip2-v4", unmixed()), "trellis-table"),
    "qtip3, not rotated": (trellis("qtip3", None), "trellis-table"),
    "qtip4b, with signs of rows": (
        trellis("qtip4b", replace(unmixed(), signs_out=np.where(np.arange(VOCABULARY) % 3, 1, -1).astype(np.int8))),
        "trellis-sum2",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_rows_are_those_of_the_oracles_matrix_bit_for_bit_and_counted_by_kind(name: str) -> None:
    table, kind = TABLES[name]
    registry = default_registry()
    prepared, oracle = registry.prepare(table), table.dense()
    assert len(np.unique(oracle.view(np.uint32))) > 100
    for ids in ([5], [0, VOCABULARY - 1, 7, 7], list(range(VOCABULARY)), []):
        got = registry.embedding(torch.tensor(ids, dtype=torch.int64), prepared).numpy()
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got.view(np.uint32), oracle[ids].view(np.uint32).reshape(len(ids), HIDDEN))
    assert registry.engagement() == {f"cpu.embedding.{kind}": 4}
    listed = {item.name for item in registry.implementations if item.operation == "embedding"}
    assert embedding_name(prepared.kind) in listed


GUARDED = """
import ctypes, mmap
import numpy as np, torch
from arctool.kernels.registry import default_registry
from arctool.quant.ggml import Q8_0
from arctool.quant.tensor import DenseTensor, GgmlTensor

memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
stored = np.frombuffer(memory, np.uint8)
inside = stored[mmap.PAGESIZE : 2 * mmap.PAGESIZE]
inside[:] = 1
dense = DenseTensor(stored.view(np.float32).reshape(-1, 256))
packed = GgmlTensor(Q8_0, 32, stored[: stored.size // 34 * 34].reshape(-1, 34))
registry = default_registry()
prepared = registry.prepare(dense), registry.prepare(packed)
libc = ctypes.CDLL(None, use_errno=True)
for page in (0, 2):
    assert libc.mprotect(ctypes.c_void_p(stored.ctypes.data + page * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
for weight, row in ((prepared[0], mmap.PAGESIZE // 1024 + 1), (prepared[1], mmap.PAGESIZE // 34 + 2)):
    assert len(set(registry.embedding(torch.tensor([row, row]), weight).numpy().ravel().tolist())) == 1
print("untouched")
"""


def test_no_row_is_touched_but_those_asked_for() -> None:
    """The pages around the wanted row cannot be read: whoever did would die."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert done.stdout == "untouched\n", done.stderr


def test_a_table_whose_rows_are_mixed_is_refused_by_the_number_that_it_mixes() -> None:
    registry = default_registry()
    mixed = registry.prepare(trellis("qtip4b", Rotation.seeded(0, "k", VOCABULARY, HIDDEN)))
    with pytest.raises(GeometryError, match=r"rows are read one by one, and this trellis-k8v2l16-sum2 mixes 32 of them"):
        registry.embedding(torch.tensor([1]), mixed)
    assert registry.engagement() == {}


@pytest.mark.parametrize("name", ["q8_0", "qtip4b"])
def test_a_tied_head_is_the_same_tensor(name: str) -> None:
    """Logits of the table's own rows: the largest is the row itself, as far as these random rows tell it from the others."""
    registry: Registry = default_registry()
    prepared = registry.prepare(TABLES[name][0])
    ids = torch.tensor([3, 50, 95])
    rows = registry.embedding(ids, prepared)
    logits = registry.linear(rows, prepared)
    dense = TABLES[name][0].dense().astype(np.float64)
    np.testing.assert_allclose(logits.numpy(), dense[ids.numpy()] @ dense.T, rtol=0, atol=1e-3)
