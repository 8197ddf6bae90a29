"""Programs on a team: kernels in order, tasks shared out, and one order of reduction whatever the tile."""

from __future__ import annotations

import itertools

import numba
import numpy as np
import pytest

from arctool.kernels.cpu.ir import dot_oracle, fma_oracle
from arctool.kernels.cpu.jit import entry, jit
from arctool.kernels.cpu.memory import i64_at, take
from arctool.kernels.cpu.program import Program
from arctool.kernels.cpu.streams_ir import OVERRUN, direct_dot, expander
from arctool.kernels.cpu.tile_ir import tile
from arctool.quant.codebooks import RUNGS
from arctool.quant.tensor import TrellisTensor
from arctool.quant.trellis import pack_symbols


@entry
def stamp(operands, step, counter, scratch):  # type: ignore[no-untyped-def]  # numba infers the types
    """out[task] = its predecessor's value + 1, for every task of 64."""
    o, tasks = i64_at(operands, 2), i64_at(step, 1)[0]
    while True:
        task = take(counter)
        if task >= tasks:
            break
        total = 0
        for i in range(tasks):  # every task reads what all tasks before the barrier wrote
            total += i64_at(o[0], tasks)[i]
        i64_at(o[1], tasks)[task] = total // tasks + 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_sees_all_that_the_one_before_it_wrote(threads: int) -> None:
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        tasks, kernels = 64, 50
        program = Program(np.array([tasks], np.int64))
        values = np.zeros((kernels + 1, tasks), np.int64)
        for i in range(kernels):
            program.add(stamp, np.array([values[i].ctypes.data, values[i + 1].ctypes.data], np.int64))
        program.seal()
        for _ in range(20):
            values[1:] = -1
            program.run()
            np.testing.assert_array_equal(values, np.arange(kernels + 1)[:, None].repeat(tasks, 1))
        values[1:] = -1
        program.run(first=0, last=7)
        assert (values[7] == 7).all()
        assert (values[8] == -1).all()
    finally:
        numba.set_num_threads(before)


def test_a_kernel_is_left_out_where_its_number_of_the_step_is_zero() -> None:
    for number, want in ((0, -1), (3, 1)):
        program = Program(np.array([64, number], np.int64))
        values = np.array([[0] * 64, [-1] * 64], np.int64)
        program.add(stamp, np.array([values[0].ctypes.data, values[1].ctypes.data], np.int64), unless=1)
        program.seal()
        program.run()
        assert (values[1] == want).all()


def run_tile(rows: int, tokens: int, w: np.ndarray, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    product = tile(rows, tokens)

    @jit()
    def call(w, w_pitch, x, x_pitch, width, scales, y, y_pitch):  # type: ignore[no-untyped-def]  # numba infers the types
        product(w, w_pitch, x, x_pitch, width, scales, y, y_pitch)

    y = np.full((tokens, rows), np.nan, np.float32)
    call(w.ctypes.data, w.shape[1], x.ctypes.data, x.shape[1], w.shape[1], scales.ctypes.data, y.ctypes.data, rows)
    return y


@pytest.mark.parametrize(("rows", "tokens"), [*itertools.product((1, 2, 4), (1, 2, 4))])
def test_a_tile_of_any_shape_gives_the_bits_of_the_oracle(rows: int, tokens: int) -> None:
    """The machine picks one shape; the others must not be able to differ on another machine."""
    generator = np.random.default_rng(rows * 10 + tokens)
    for width in (16, 48, 576):
        w, x = (generator.standard_normal((n, width)).astype(np.float32) for n in (rows, tokens))
        scales = generator.standard_normal(rows).astype(np.float32)
        want = np.stack([dot_oracle(w, token) * scales for token in x])
        np.testing.assert_array_equal(run_tile(rows, tokens, w, x, scales), want)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", ["qtip2-v4", "qtip2.25-v4", "qtip4", "qtip3", "qtip2"])
def test_rows_that_go_straight_from_their_table_give_the_bits_of_the_oracle(name: str, rows: int) -> None:
    """Again whatever the machine's registers: as many rows as its tile has are taken at once."""
    rung = RUNGS[name]
    dot, width = direct_dot(rung.geometry, rows), 96
    generator = np.random.default_rng(rows)
    symbols = generator.integers(0, 1 << rung.geometry.k, (rows, width // rung.geometry.v))
    weight = TrellisTensor(rung.geometry, rung.codebook(), width, pack_symbols(symbols, rung.geometry), np.ones(rows, np.float32), None)
    packed = np.concatenate([weight.packed.reshape(-1), np.zeros(OVERRUN, np.uint8)])
    table = np.ascontiguousarray(rung.codebook().values(rung.geometry)).reshape(-1)
    x, scales = (generator.standard_normal(n).astype(np.float32) for n in (width, rows))
    y = np.full(rows, np.nan, np.float32)

    @jit()
    def call(source, row_bytes, table, periods, x, scales, y):  # type: ignore[no-untyped-def]  # numba infers the types
        dot(source, row_bytes, table, periods, x, scales, y)

    periods = expander(rung.geometry, False).periods(width)
    call(packed.ctypes.data, weight.packed.shape[1], table.ctypes.data, periods, x.ctypes.data, scales.ctypes.data, y.ctypes.data)
    np.testing.assert_array_equal(y, dot_oracle(weight.decode(), x) * scales)


def test_the_oracles_multiply_add_rounds_once() -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(200_000).astype(np.float32) for _ in range(2))
    exponents = generator.integers(-30, 30, 200_000)
    c = (generator.standard_normal(200_000) * 2.0**exponents).astype(np.float32)
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)  # 64 bits hold most of these sums exactly
    exact = (wide - c.astype(np.longdouble) == a.astype(np.longdouble) * b.astype(np.longdouble)) & (np.abs(exponents) < 12)
    assert exact.sum() > 50_000
    np.testing.assert_array_equal(fma_oracle(a, b, c)[exact], wide.astype(np.float32)[exact])
    # (1 + 2^-12)² is the middle of two f32; 2^-50 more or less decides, and f64 has no room for it.
    a, b, c = (np.array([v], np.float32) for v in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-50))
    assert fma_oracle(a, b, c)[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert fma_oracle(a, b, -c)[0] == np.float32(1 + 2.0**-11)
