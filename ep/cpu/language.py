"""What kernels for a processor need and Numba's Python lacks: memory by address, bfloat16, bits, a shared counter.

A bfloat16 is the upper half of a float32, and is kept as a uint16. Everything here is called from kernels only, and
becomes a few instructions each, so that loops over it are vectorised.

    floats(address)[3] += widen(halves(other)[5])
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = [
    "add",
    "bits_double",
    "claim",
    "declared",
    "exp",
    "fetch",
    "floats",
    "halves",
    "load",
    "longs",
    "narrow",
    "narrow_lanes",
    "narrowed",
    "silu",
    "store",
    "widen",
]

_WORD = ir.IntType(64)
INLINE: dict[str, Any] = {"inline": "always", "error_model": "numpy"}

_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
_C2, _C3, _C4 = np.float32(0.5), np.float32(0.16666577), np.float32(0.04166646)
_C5, _C6 = np.float32(0.00836321), np.float32(0.00139337)
"""Of e^r from r^2 on, fitted (Chebyshev) where |r| <= ln(2) / 2."""


def declared(builder: ir.IRBuilder, name: str, result: Any, *arguments: Any) -> Any:
    """A function of LLVM's own, for whoever writes in its words; declared once a module."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def at(_typing, _address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return at


halves = _pointer_to(types.uint16)
"""Memory at an address as uint16."""
floats = _pointer_to(types.float32)
"""As float32."""
longs = _pointer_to(types.int64)
"""As int64."""


def _bits_as(source: Any, target: Any) -> Any:
    @intrinsic
    def same(_typing, _value):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return target(source), generate

    return same


_bits_float = _bits_as(types.uint32, types.float32)
_float_bits = _bits_as(types.float32, types.uint32)
bits_double = _bits_as(types.int64, types.float64)
"""A float64 that came among int64 arguments."""


@intrinsic
def _claim(_typing, _counter):
    def generate(_context, builder, _signature, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(_WORD, 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def _add(_typing, _address, _value):
    def generate(_context, builder, _signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _load(_typing, _address):
    def generate(_context, builder, _signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], _WORD.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(_typing, _address, _value):
    def generate(context, builder, _signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


claim: Any = _claim
"""claim(args): the piece of work that is this thread's now; one that is not there when all are taken."""
add: Any = _add
"""add(address, value): the int64 there before, for all threads alike."""
load: Any = _load
"""load(address): the int64 that other threads may write."""
store: Any = _store
"""store(address, value): an int64 that other threads may read."""


@intrinsic
def _fetch(_typing, _address):
    def generate(context, builder, _signature, args):
        word, place = ir.IntType(32), ir.IntType(8).as_pointer()
        prefetch = declared(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, word, word, word)
        read, soon, data = (ir.Constant(word, number) for number in (0, 3, 1))
        builder.call(prefetch, [builder.inttoptr(args[0], place), read, soon, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


fetch: Any = _fetch
"""Have the cache line of an address brought near, which may be read soon; any address will do."""


@njit(**INLINE)
def widen(half):
    """The float32 of a bfloat16."""
    return _bits_float(np.uint32(half) << np.uint32(16))


@njit(**INLINE)
def narrow(value):
    """The bfloat16 nearest to a float32, ties to even; NaN stays NaN."""
    bits = _float_bits(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(np.uint32(0x7FC0) if value != value else rounded)


@intrinsic
def _narrow_lanes(_typing, _source, _target):
    """`narrow`, lane by lane, in LLVM's words."""
    lanes = 16
    floats_, words, shorts = (ir.VectorType(kind, lanes) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16)))

    def all_lanes(value):
        return ir.Constant(words, [value] * lanes)

    def generate(context, builder, _signature, args):
        values = builder.load(builder.inttoptr(args[0], floats_.as_pointer()), align=4)
        bits = builder.bitcast(values, words)
        odd = builder.and_(builder.lshr(bits, all_lanes(16)), all_lanes(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, all_lanes(0x7FFF))), all_lanes(16))
        kept = builder.select(builder.fcmp_unordered("uno", values, values), all_lanes(0x7FC0), rounded)
        builder.store(builder.trunc(kept, shorts), builder.inttoptr(args[1], shorts.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


narrow_lanes: Any = _narrow_lanes
"""narrow_lanes(source, target): 16 float32 at an address, rounded to bfloat16 at another."""


@njit(**INLINE)
def narrowed(value):
    """A float32 rounded to bfloat16."""
    return widen(narrow(value))


@njit(**INLINE)
def exp(x):
    """e^x in float32, within 2 units of the last place; x is taken to be from -87 to 88. NaN stays NaN.

    x = n ln(2) + r, e^x = 2^n e^r (Cody and Waite, Software Manual for the Elementary Functions, chapter 6).
    """
    x = min(max(x, _LEAST), _MOST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    series = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    return series * _bits_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@njit(**INLINE)
def silu(x):
    """x / (1 + e^-x)."""
    return x / (_ONE + exp(-x))
