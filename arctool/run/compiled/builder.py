"""The pieces of which every layer's kernels are made: shared buffers, norms that spread to their readers, products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.cpu import linear, stages
from arctool.kernels.cpu.operands import Rows, padded_width, rows_of
from arctool.kernels.cpu.products import placed
from arctool.kernels.cpu.program import Program
from arctool.kernels.registry import linear_name
from arctool.run.compiled.inputs import TOKENS, Inputs, StepLimits
from arctool.run.kv.cache import KVCache
from arctool.run.layers.linear import Linear, Projection
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.models.decoder import CausalLM

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Reader:
    """A product to come, and the buffer that it will read."""

    layer: Linear
    rows: Rows
    x: Array


class Builder:
    """Puts the kernels of a model in order over shared buffers."""

    def __init__(self, model: CausalLM, cache: KVCache, limits: StepLimits, inputs: Inputs, numbers: NDArray[np.int64]) -> None:
        self.model, self.cache, self.limits, self.inputs = model, cache, limits, inputs
        self.program = Program(numbers)
        self._buffers: dict[tuple[str, int, int], NDArray[Any]] = {}
        self.program.keep(inputs, cache)

    def buffer(self, name: str, width: int, rows: int | None = None) -> Array:
        """The f32 zeros [rows, width padded to 16] of that name and size; buffers of layers of one shape are the same one."""
        key = (name, width, self.limits.tokens if rows is None else rows)
        if key not in self._buffers:
            self._buffers[key] = np.zeros((key[2], padded_width(width)), np.float32)
            self.program.keep(self._buffers[key])
        return self._buffers[key]

    def integers(self, name: str, count: int) -> NDArray[np.int64]:
        """The i64 [count] of that name and size, shared in the same way."""
        key = (name, count, 0)
        if key not in self._buffers:
            self._buffers[key] = np.zeros(count, np.int64)
            self.program.keep(self._buffers[key])
        return self._buffers[key]

    def norm(
        self,
        norm: RMSNorm | None,
        x: Array,
        add: Array | None,
        readers: Sequence[Reader],
        *,
        also: NDArray[np.int64] | None = None,
        rows: NDArray[np.int64] | None = None,
        count: int = TOKENS,
        width: int | None = None,
    ) -> None:
        """x += add, and the norm of x (or x itself) to the buffers of its readers."""
        gain = None if norm is None else np.ascontiguousarray(norm.gain.numpy())
        operands = np.zeros(stages.N_SPREAD, np.int64)
        operands[stages.N_X], operands[stages.N_X_PITCH] = x.ctypes.data, x.shape[1]
        if add is not None:
            operands[stages.N_ADD], operands[stages.N_ADD_PITCH] = add.ctypes.data, add.shape[1]
        operands[stages.N_WIDTH] = self.model.config.hidden_size if width is None else width
        if norm is not None and gain is not None:
            operands[stages.N_GAIN] = gain.ctypes.data
            operands[stages.N_EPS : stages.N_EPS + 1].view(np.float32)[0] = norm.eps
            self.program.keep(gain)
        operands[stages.N_ROWS] = 0 if rows is None else rows.ctypes.data
        operands[stages.N_COUNT] = count
        # Readers of an unrotated activation share one buffer; it is written once.
        targets = list({t.tobytes(): t for t in (*map(self.turned, readers), *(() if also is None else (also,)))}.values())
        operands[stages.N_TARGETS] = len(targets)
        self.stage(stages.add_and_norm, operands, targets, scratch=4 * padded_width(int(operands[stages.N_WIDTH])))

    def stage(self, kernel: Callable[[], int], operands: NDArray[np.int64], targets: Sequence[NDArray[np.int64]], scratch: int) -> None:
        """A kernel whose operands end with the targets of its spread."""
        self.program.add(kernel, np.concatenate([operands, *targets]), scratch=scratch)

    def target(self, out: Array, layer: Linear | None) -> NDArray[np.int64]:
        """A target of a spread: as it is, or rotated for a layer."""
        rotation = None if layer is None else layer.weight.rotation
        signs, block = (0, 0) if rotation is None else (rotation.signs_in.ctypes.data, rotation.block_in)
        return np.array([out.ctypes.data, out.shape[1], signs, block], np.int64)

    def turned(self, reader: Reader) -> NDArray[np.int64]:
        """The target that a reader's activations go to."""
        return self.target(reader.x, reader.layer)

    def reader(self, part: Projection, name: str, rows: int | None = None) -> Reader:
        """A product to come; rotated inputs have a buffer for each `name`, others share one."""
        if not isinstance(part, Linear):
            raise TypeError(f"{type(part).__name__} is no layer with stored weights")
        stored = rows_of(part.weight)
        self.program.keep(part, stored)
        rotated = part.weight.rotation is not None
        return Reader(part, stored, self.buffer(f"{name} in" if rotated else "plain in", part.weight.in_features, rows))

    def product(self, reader: Reader, out: Array, count: int, *, meet: bool = True) -> None:
        """A product over `count`'s number of rows, from the reader's buffer into `out`."""
        operands = self.operands(reader, out)
        operands[linear.COUNT] = count
        self.program.add(linear.product(reader.rows.kind), operands, scratch=reader.rows.scratch, meet=meet)
        self.program.count(linear_name(reader.layer.weight.kind), count)

    def operands(self, reader: Reader, out: Array) -> NDArray[np.int64]:
        """The operands of a product, bias included."""
        operands = placed(reader.rows, reader.x, out)
        if reader.layer.bias is not None:
            bias = np.ascontiguousarray(reader.layer.bias.numpy())
            operands[linear.BIAS] = bias.ctypes.data
            self.program.keep(bias)
        return operands
