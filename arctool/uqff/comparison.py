"""One packed layer, as every implementation here decodes it, against the oracle: block by block, bit by bit.

Memory holds a few blocks of rows at a time. Knows no kernels, which are handed in, and no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from arctool.quant.rows import bounded_rows
from arctool.quant.tensor import PackedTensor, as_matrix
from arctool.uqff.answers import Tally
from arctool.uqff.chunks import MAX_ROW

BLOCK_WEIGHTS: Final = 1 << 19
"""Weights that the oracle and an implementation decode at a time; the oracle needs some tens of bytes for each."""

AHEAD: Final = 3
"""Blocks that the oracle works on while one is compared."""


class Decoder(Protocol):
    """One implementation of the decode on this machine."""

    @property
    def name(self) -> str: ...

    @property
    def zero_signs(self) -> bool:
        """Whether −0.0 comes out as such. False for values that are read out of a sum: there −0.0 + 0.0 is 0.0, as IEEE 754 says."""
        ...

    def accepts(self, weight: PackedTensor) -> bool:
        """Whether this implementation would serve `weight`; asked once a layer."""
        ...

    def decode(self, weight: PackedTensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(rising columns [n], their weights f32 [rows, n] in the basis that is stored): what is given is compared, and counted.

        `weight` is a block of a layer's rows, its rotation left out.
        """
        ...


def obstacle(weight: PackedTensor, misfit: bool, accepted: bool) -> str:
    """Why a layer is not worth the oracle's time, empty if it is: nobody could run it, or its file was made to waste that time."""
    if misfit:
        return f"the model has no such layer of shape {list(weight.shape)}"
    if weight.in_features > MAX_ROW:
        return f"rows of {weight.in_features} weights are longer than the {MAX_ROW} that are ever compared"
    return "" if accepted else f"no implementation accepts {weight.label} {list(weight.shape)}"


def compare_layer(
    key: str, weight: PackedTensor, decoders: list[Decoder], tally: Tally, pool: Executor, done: Callable[[], None]
) -> dict[str, tuple[int, int]]:
    """(compared, differing) weights by implementation; the first difference of each goes into `tally`.

    The oracle decodes the next blocks in `pool` while implementations, which have threads of their own, are asked one after the other.
    `done` is called after each block.
    """
    weight = as_matrix(weight)  # a row is decoded alone, whichever expert's it is
    counts = {decoder.name: (0, 0) for decoder in decoders}
    blocks = bounded_rows(weight.shape[0], *weight.shape[1:], most=BLOCK_WEIGHTS) if decoders else iter(())
    for start, block, oracle in _ahead(weight, blocks, pool):
        for decoder in decoders:
            first, compared, differing = _difference(decoder, block, oracle)
            before = counts[decoder.name]
            if differing and not before[1]:
                tally.fail(f"{key}: {decoder.name}: {first} (rows counted from {start})")
            counts[decoder.name] = before[0] + compared, before[1] + differing
        done()
    return counts


def _ahead(weight: PackedTensor, blocks: Iterator[slice], pool: Executor) -> Iterator[tuple[int, PackedTensor, NDArray[np.float32]]]:
    """(first row, block, the oracle's weights as a matrix) in order; `AHEAD` blocks are being decoded while one is looked at."""
    waiting: deque[tuple[int, PackedTensor, Future[NDArray[np.float32]]]] = deque()
    for part in blocks:
        block = weight.rows(part)
        waiting.append((part.start, block, pool.submit(block.decode)))
        if len(waiting) > AHEAD:
            start, block, oracle = waiting.popleft()
            yield start, block, oracle.result()
    while waiting:
        start, block, oracle = waiting.popleft()
        yield start, block, oracle.result()


def _difference(decoder: Decoder, block: PackedTensor, oracle: NDArray[np.float32]) -> tuple[str, int, int]:
    """(first difference in words, weights compared, weights that differ) of one block; without an answer nothing is compared."""
    try:
        columns, found = (np.asarray(part) for part in decoder.decode(block))
    except Exception as error:  # whatever a broken implementation throws is its answer, and the others must still be heard
        return f"raised {type(error).__name__}: {error}", 0, oracle.size
    if not _rising(columns, oracle.shape[1]):
        return f"gave {str(columns)[:60]} as columns, expected rising ones from 0 to {oracle.shape[1] - 1}", 0, oracle.size
    want = oracle[:, columns]
    if found.dtype != np.float32 or found.shape != want.shape:
        return f"gave {found.dtype} {list(found.shape)}, expected float32 {list(want.shape)}", 0, oracle.size
    wrong = np.ascontiguousarray(found).view(np.uint32) != want.view(np.uint32)
    if not decoder.zero_signs:
        wrong &= (found != 0) | (want != 0)
    count = int(np.count_nonzero(wrong))
    if not count:
        return "", found.size, 0
    row, at = (int(index) for index in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    left, right = want[row, at], found[row, at]
    bits = f"{int(left.view(np.uint32)):08x}", f"{int(right.view(np.uint32)):08x}"
    words = f"row {row}, column {int(columns[at])}: expected {left!s} (0x{bits[0]}), found {right!s} (0x{bits[1]})"
    return words, found.size, count


def _rising(columns: NDArray, in_features: int) -> bool:
    """Whether `columns` are at least one and different columns of a row, in order."""
    if columns.ndim != 1 or not columns.size or columns.dtype.kind not in "iu":
        return False
    return bool(columns[0] >= 0 and columns[-1] < in_features and (np.diff(columns.astype(np.int64)) > 0).all())
