"""The innermost part of every matmul in bf16: a few rows times a panel of a packed weight, summed in float32.

A row's sums are taken in the same order whichever rows it is multiplied with. Processors that multiply pairs of
bfloat16 (AVX512_BF16) do so; others widen both halves of a pair and multiply twice.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .language import declared
from .panels import COLUMNS, LANES

__all__ = ["FLOATS", "INT32", "INT64", "INTS", "MULTIPLIES_PAIRS", "ROWS", "summed_over", "tile", "tile_of", "times_of"]

VECTORS = COLUMNS // LANES
MULTIPLIES_PAIRS = bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))
"""Whether this processor multiplies pairs of bfloat16."""
ROWS = 12 if MULTIPLIES_PAIRS else 4
"""Rows of a tile: as many as leave all sums in registers."""

INT32, INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(INT32, LANES)


class _BFloat(ir.types.Type):
    """llvmlite has no word for LLVM's own bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _times_pairs(builder: ir.IRBuilder, sums: Any, row: Any, weight: Any) -> Any:
    multiply = declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, FLOATS, _PAIRS, _PAIRS)
    return builder.call(multiply, [sums, builder.bitcast(row, _PAIRS), builder.bitcast(weight, _PAIRS)])


def _times_twice(builder: ir.IRBuilder, sums: Any, row: Any, weight: Any) -> Any:
    multiply = declared(builder, "llvm.fmuladd.v16f32", FLOATS, FLOATS, FLOATS, FLOATS)
    up, high = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [0xFFFF0000] * LANES)
    for half in (lambda pair: builder.shl(pair, up), lambda pair: builder.and_(pair, high)):
        first, second = (builder.bitcast(half(pair), FLOATS) for pair in (row, weight))
        sums = builder.call(multiply, [first, second, sums])
    return sums


def times_of(*, multiplies_pairs: bool) -> Callable[[ir.IRBuilder, Any, Any, Any], Any]:
    """What adds to 16 float32 sums the products of 16 pairs with 16 others, given as int32."""
    return _times_pairs if multiplies_pairs else _times_twice


def summed_over(
    builder: ir.IRBuilder, count: Any, num_sums: int, more: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """So many vectors of float32 sums over 0 .. count - 1, count at least 1: more(number, sums) gives the sums with
    what that number adds."""
    entry, loop = builder.block, builder.append_basic_block("numbers")
    after = builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(INT64)
    number.add_incoming(ir.Constant(INT64, 0), entry)
    before = [builder.phi(FLOATS) for _ in range(num_sums)]
    now = more(number, before)
    following = builder.add(number, ir.Constant(INT64, 1))
    number.add_incoming(following, loop)
    for old, new in zip(before, now, strict=True):
        old.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), entry)
        old.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return now


def _tile_of(num_rows: int, *, multiplies_pairs: bool) -> Any:
    times = times_of(multiplies_pairs=multiplies_pairs)

    @intrinsic
    def multiply(_typing, _addresses, _weight, _num_pairs, _sums):
        def generate(context, builder, _signature, args):
            table, weight, num_pairs, sums = args
            table = builder.inttoptr(table, INT64.as_pointer())
            rows = [
                builder.inttoptr(builder.load(builder.gep(table, [ir.Constant(INT64, m)])), INT32.as_pointer())
                for m in range(num_rows)
            ]
            panel = builder.inttoptr(weight, INTS.as_pointer())

            def more(pair, sums_before):
                weights = []
                for vector in range(VECTORS):
                    place = builder.add(builder.mul(pair, ir.Constant(INT64, VECTORS)), ir.Constant(INT64, vector))
                    weights.append(builder.load(builder.gep(panel, [place]), align=4))
                now = []
                for m, row in enumerate(rows):
                    undefined = ir.Constant(INTS, ir.Undefined)
                    one = builder.insert_element(
                        undefined, builder.load(builder.gep(row, [pair])), ir.Constant(INT32, 0)
                    )
                    all_lanes = builder.shuffle_vector(one, undefined, ir.Constant(INTS, [0] * LANES))
                    for vector, each in enumerate(weights):
                        now.append(times(builder, sums_before[m * VECTORS + vector], all_lanes, each))
                return now

            now = summed_over(builder, num_pairs, num_rows * VECTORS, more)
            out = builder.inttoptr(sums, FLOATS.as_pointer())
            for number, vector in enumerate(now):
                builder.store(vector, builder.gep(out, [ir.Constant(INT64, number)]), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return multiply


def tile_of(*, multiplies_pairs: bool) -> Any:
    """`tile` for either kind of processor."""
    by_rows = [_tile_of(num_rows, multiplies_pairs=multiplies_pairs) for num_rows in range(1, 13)]
    one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve = by_rows

    @njit(error_model="numpy")
    def any_rows(num_rows, addresses, weight, num_pairs, sums):
        if num_rows == 1:
            one(addresses, weight, num_pairs, sums)
        elif num_rows == 2:
            two(addresses, weight, num_pairs, sums)
        elif num_rows == 3:
            three(addresses, weight, num_pairs, sums)
        elif num_rows == 4:
            four(addresses, weight, num_pairs, sums)
        elif num_rows == 5:
            five(addresses, weight, num_pairs, sums)
        elif num_rows == 6:
            six(addresses, weight, num_pairs, sums)
        elif num_rows == 7:
            seven(addresses, weight, num_pairs, sums)
        elif num_rows == 8:
            eight(addresses, weight, num_pairs, sums)
        elif num_rows == 9:
            nine(addresses, weight, num_pairs, sums)
        elif num_rows == 10:
            ten(addresses, weight, num_pairs, sums)
        elif num_rows == 11:
            eleven(addresses, weight, num_pairs, sums)
        else:
            twelve(addresses, weight, num_pairs, sums)

    return any_rows


tile = tile_of(multiplies_pairs=MULTIPLIES_PAIRS)
"""tile(num_rows, addresses, weight, num_pairs, sums): sums [num_rows, COLUMNS] float32 of 1 to 12 rows, whose addresses
lie at `addresses` (int64), each of num_pairs x 2 bfloat16; weight: the address of a panel."""
