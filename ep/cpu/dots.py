"""What attention over rows that are multiplied once needs beside `tile`: dot products of rows as they lie, all bf16 and
of one width, summed in float32; rows paired up to be a panel; a maximum.

There are SUMS sums at once, a register each. Those are then added up together: every step halves their number and the
lanes of each, so that 16 vectors become one whose lanes are the 16 sums.

    a0 a1 a2 a3  b0 b1 b2 b3  ..    ->    a0+a2 b0+b2 a1+a3 b1+b3  ..    ->    a b c d    (per 128 bits)

A sum is taken in the same order whichever of the 16 it is.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .panels import LANES
from .tile import FLOATS, INT32, INT64, INTS, MULTIPLIES_PAIRS, summed_over, times_of

__all__ = ["SUMS", "WIDTH", "carry_on", "dots", "largest", "pair_up"]

SUMS = LANES
WIDTH = 2 * LANES
"""Rows are a multiple of so many values wide."""

_FLOAT = ir.FloatType()
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_HALVINGS = (
    ([0, 16, 1, 17], [2, 18, 3, 19]),
    ([0, 1, 16, 17], [2, 3, 18, 19]),
)
"""Of 4 lanes of two vectors (the second one's are 16 and on), which lie side by side; likewise in the other 3 fours."""
_FOURS = ([0, 2, 4, 6], [1, 3, 5, 7])
"""Fours of two vectors (the second one's are 4 and on), which lie side by side."""


def _picks() -> list[tuple[list[int], list[int]]]:
    """For each step which lanes of two vectors are added to which."""
    within = [
        tuple([lane + 4 * four for four in range(4) for lane in lanes] for lanes in halving) for halving in _HALVINGS
    ]
    across = tuple([4 * four + lane for four in fours for lane in range(4)] for fours in _FOURS)
    return [*within, across, across]  # type: ignore[list-item]


def _added_up(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """One vector: lane i is the sum over all lanes of vector i."""
    for first, second in _picks():
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(
                builder.shuffle_vector(one, other, ir.Constant(INTS, first)),
                builder.shuffle_vector(one, other, ir.Constant(INTS, second)),
            )
            for one, other in pairs
        ]
    (summed,) = vectors
    return summed


def _dots_of(num_queries: int, *, multiplies_pairs: bool) -> Any:
    times, num_rows = times_of(multiplies_pairs=multiplies_pairs), SUMS // num_queries

    @intrinsic
    def multiply(_typing, _queries, _query_bytes, _addresses, _num_vectors, _sums, _sums_bytes):
        def generate(context, builder, _signature, args):
            queries, query_bytes, table, num_vectors, sums, sums_bytes = args

            def at(begin, stride, number):
                return builder.add(begin, builder.mul(stride, ir.Constant(INT64, number)))

            table = builder.inttoptr(table, INT64.as_pointer())
            asked = [
                builder.inttoptr(at(queries, query_bytes, number), INTS.as_pointer()) for number in range(num_queries)
            ]
            rows = [
                builder.inttoptr(builder.load(builder.gep(table, [ir.Constant(INT64, m)])), INTS.as_pointer())
                for m in range(num_rows)
            ]

            def more(place, sums_before):
                values = [builder.load(builder.gep(row, [place]), align=4) for row in rows]
                now = []
                for number, query in enumerate(asked):
                    vector, first = builder.load(builder.gep(query, [place]), align=4), number * num_rows
                    now += [times(builder, sums_before[first + m], vector, value) for m, value in enumerate(values)]
                return now

            now = summed_over(builder, num_vectors, SUMS, more)
            summed, some = _added_up(builder, now), ir.VectorType(_FLOAT, num_rows)
            for number in range(num_queries):
                lanes = ir.Constant(ir.VectorType(INT32, num_rows), [number * num_rows + m for m in range(num_rows)])
                out = builder.inttoptr(at(sums, sums_bytes, number), some.as_pointer())
                builder.store(builder.shuffle_vector(summed, summed, lanes), out, align=4)
            return context.get_dummy_value()

        given = (types.int64,) * 6
        return types.void(*given), generate

    return multiply


def dots_of(*, multiplies_pairs: bool) -> Any:
    """`dots` for either kind of processor."""
    four, eight = (_dots_of(num_queries, multiplies_pairs=multiplies_pairs) for num_queries in (4, 8))

    @njit(error_model="numpy")
    def of_queries(num_queries, queries, query_bytes, addresses, num_vectors, sums, sums_bytes):
        if num_queries == 8:
            eight(queries, query_bytes, addresses, num_vectors, sums, sums_bytes)
        else:
            four(queries, query_bytes, addresses, num_vectors, sums, sums_bytes)

    return of_queries


dots = dots_of(multiplies_pairs=MULTIPLIES_PAIRS)
"""dots(num_queries, queries, query_bytes, addresses, num_vectors, sums, sums_bytes): float32 sums of 4 or 8 queries,
`query_bytes` apart, times SUMS / num_queries rows, whose addresses lie at `addresses` (int64); a row's and a query's
width is num_vectors x WIDTH. The sums of a query lie side by side, those of the next one `sums_bytes` further on."""


@intrinsic
def _pair_up(_typing, _one, _other, _to):
    def generate(context, builder, _signature, args):
        one, other, to = (builder.inttoptr(address, _HALVES.as_pointer()) for address in args)
        one, other = builder.load(one, align=2), builder.load(other, align=2)
        for vector in range(2):
            lanes = [16 * vector + lane // 2 + 32 * (lane % 2) for lane in range(32)]
            paired = builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, 32), lanes))
            builder.store(paired, builder.gep(to, [ir.Constant(INT64, vector)]), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


pair_up: Any = _pair_up
"""pair_up(one, other, to): 32 values of two rows, by turns: two inputs in a panel of `tile`, its outputs are the rows'
columns."""


@intrinsic
def _carry_on(_typing, _sums, _share, _more):
    def generate(context, builder, _signature, args):
        sums, more = (builder.inttoptr(address, FLOATS.as_pointer()) for address in (args[0], args[2]))
        one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), args[1], ir.Constant(INT32, 0))
        share = builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))
        for vector in range(WIDTH // LANES):
            place = [ir.Constant(INT64, vector)]
            before, added = (builder.load(builder.gep(each, place), align=4) for each in (sums, more))
            builder.store(builder.fadd(builder.fmul(before, share), added), builder.gep(sums, place), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


carry_on: Any = _carry_on
"""carry_on(sums, share, more): COLUMNS float32 sums become sums * share + more."""


@intrinsic
def _largest(_typing, _address, _num_vectors):
    def generate(_context, builder, _signature, args):
        def larger(one, other):
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        vectors = builder.inttoptr(args[0], FLOATS.as_pointer())
        entry, loop = builder.block, builder.append_basic_block("compared")
        after = builder.append_basic_block("over")
        first = builder.load(vectors, align=4)
        builder.branch(loop)
        builder.position_at_end(loop)
        place, before = builder.phi(INT64), builder.phi(FLOATS)
        now = larger(builder.load(builder.gep(vectors, [place]), align=4), before)
        following = builder.add(place, ir.Constant(INT64, 1))
        for value, start, following_value in ((place, ir.Constant(INT64, 0), following), (before, first, now)):
            value.add_incoming(start, entry)
            value.add_incoming(following_value, loop)
        builder.cbranch(builder.icmp_signed("<", following, args[1]), loop, after)
        builder.position_at_end(after)
        for apart in (8, 4, 2, 1):
            lanes = ir.Constant(INTS, [(lane + apart) % LANES for lane in range(LANES)])
            now = larger(builder.shuffle_vector(now, now, lanes), now)
        return builder.extract_element(now, ir.Constant(INT32, 0))

    return types.float32(types.int64, types.int64), generate


largest: Any = _largest
"""largest(address, num_vectors): of num_vectors (at least one) x LANES float32. NaN may be passed over, or not."""
