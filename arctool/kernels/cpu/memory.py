"""Memory by address: how kernels of a program see their operands, and the three atomic operations of its team.

Addresses are plain integers, so one signature serves every kernel; whoever writes an address into an operand keeps its array alive.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from arctool.kernels.cpu.ir import I8, I32, I64, pointer
from arctool.kernels.cpu.jit import jit


def _pointer_of(kind: types.Type) -> Any:
    @intrinsic
    def pointer_at(typing_context: Any, address: Any) -> Any:
        """The pointer to the value of a fixed type at an address."""
        signature = types.CPointer(kind)(types.int64)

        def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(sig.return_type))

        return signature, generate

    return pointer_at


_f32, _u8, _u16, _i64 = (_pointer_of(kind) for kind in (types.float32, types.uint8, types.uint16, types.int64))


@jit()
def f32_at(address, count):  # type: ignore[no-untyped-def]  # numba infers the types
    """f32 [count]."""
    return carray(_f32(address), (count,))


@jit()
def u8_at(address, count):  # type: ignore[no-untyped-def]  # numba infers the types
    """u8 [count]."""
    return carray(_u8(address), (count,))


@jit()
def u16_at(address, count):  # type: ignore[no-untyped-def]  # numba infers the types
    """u16 [count]."""
    return carray(_u16(address), (count,))


@jit()
def i64_at(address, count):  # type: ignore[no-untyped-def]  # numba infers the types
    """i64 [count]."""
    return carray(_i64(address), (count,))


@intrinsic
def take(typing_context: Any, counter: Any) -> Any:
    """The i64 at an address before one is added to it, atomically: a lane takes its next task."""
    signature = types.int64(types.int64)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, arguments[0], I64), I64(1), "acq_rel")

    return signature, generate


@intrinsic
def current(typing_context: Any, counter: Any) -> Any:
    """The i64 at an address as other lanes have left it."""
    signature = types.int64(types.int64)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        return builder.load_atomic(pointer(builder, arguments[0], I64), "acquire", 8)

    return signature, generate


LINE = 64
"""Bytes of a cache line."""


@intrinsic
def fetch_line(typing_context: Any, address: Any) -> Any:
    """Begin to bring the cache line at an address near; nothing waits for it, and any address will do."""
    signature = types.void(types.int64)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer(builder, arguments[0], I8), I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return signature, generate


@jit()
def fetch(address, size):  # type: ignore[no-untyped-def]  # numba infers the types
    """Begin to bring `size` bytes near."""
    for offset in range(0, size, LINE):
        fetch_line(address + offset)


@intrinsic
def give_way(typing_context: Any) -> Any:
    """Let another thread have this core: `sched_yield`."""
    signature = types.void()

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def call_entry(typing_context: Any, entry: Any, operands: Any, step: Any, counter: Any, scratch: Any) -> Any:
    """Call the kernel at address `entry` with its four arguments (`jit.entry`)."""
    signature = types.void(*[types.int64] * 5)

    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(pointer(builder, arguments[0], kind), list(arguments[1:]))
        return context.get_dummy_value()

    return signature, generate
