"""Before the first token: does this exchange, as it was built, bring rows to their slots and sums back?

    pattern         slots that token t of rank r asks for
    spread          different ones for each token
    one slot        the last slot of all, k times
    own rank        this rank's own
    some masked     as spread, every second one of no expert
    one rank idle   as spread, rank 0 without a token

Rows hold one number each, which every format on the wire keeps; the expert of slot s multiplies by 1 + s % 3. So every
rank knows how many pairs come to it, what they sum up to, and what has to come back. Each pattern is put through the
exchange as it is, and where that may leave rows behind, through its exact hops too.

Legend: T tokens here, K top-k, R ranks, L slots of a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .errors import TransportError
from .exchange import Arrivals, Exchange
from .rows import wide
from .terms import Terms
from .transport import Kind, Tag

TOKENS = 3
TOLERANCE = 1 / 64
"""Relative: bf16 keeps 8 bits of what is sent back."""

Pattern = Callable[[int, int, int, int], tuple[int, list[int]]]
"""pattern(rank, num_ranks, slots_per_rank, top_k) -> (tokens, slots of all of them)."""


def _spread(rank: int, num_ranks: int, per_rank: int, top_k: int) -> tuple[int, list[int]]:
    places = itertools.product(range(TOKENS), range(top_k))
    return TOKENS, [(5 * rank + 7 * token + 3 * k) % (num_ranks * per_rank) for token, k in places]


def _one_slot(_rank: int, num_ranks: int, per_rank: int, top_k: int) -> tuple[int, list[int]]:
    return TOKENS, [num_ranks * per_rank - 1] * (TOKENS * top_k)


def _own_rank(rank: int, _num_ranks: int, per_rank: int, top_k: int) -> tuple[int, list[int]]:
    return TOKENS, [rank * per_rank + place % per_rank for place in range(TOKENS * top_k)]


def _some_masked(rank: int, num_ranks: int, per_rank: int, top_k: int) -> tuple[int, list[int]]:
    tokens, slots = _spread(rank, num_ranks, per_rank, top_k)
    return tokens, [slot if place % 2 else -1 for place, slot in enumerate(slots)]


def _one_idle(rank: int, num_ranks: int, per_rank: int, top_k: int) -> tuple[int, list[int]]:
    return (0, []) if rank == 0 else _spread(rank, num_ranks, per_rank, top_k)


PATTERNS: dict[str, Pattern] = {
    "spread": _spread,
    "one slot": _one_slot,
    "own rank": _own_rank,
    "some masked": _some_masked,
    "one rank idle": _one_idle,
}


class SelfTestFailed(TransportError):
    """A pattern did not come through: pattern, what, expected, found."""

    def __init__(self, pattern: str, what: str, expected: object, found: object, *, rank: int) -> None:
        super().__init__(
            f"self-test of the exchange, pattern {pattern!r}: {what}: expected {expected}, found {found}", rank=rank
        )
        self.pattern = pattern
        self.what = what


def self_test(exchange: Exchange, *, first_step: int = 0) -> None:
    """All ranks together; raises SelfTestFailed on the rank that finds something wrong. `exchange` is used by nobody
    else meanwhile, and its flags and counters start anew afterwards. Its tags are those of steps from `first_step`."""
    for pattern in patterns(exchange, first_step=first_step):
        pattern()
    exchange.check_faults()
    exchange.take_bytes()


def patterns(exchange: Exchange, *, first_step: int = 0) -> list[Callable[[], None]]:
    """The self-test's parts, to be run in this order. A rank that finds something wrong has ended its part like all."""
    steps = itertools.count(first_step)
    parts = [partial(_try, exchange, name, pattern, exact=False, steps=steps) for name, pattern in PATTERNS.items()]
    if not exchange.may_overflow:
        return parts
    exact = [
        partial(_try, exchange, f"{name}, exact", pattern, exact=True, steps=steps)
        for name, pattern in PATTERNS.items()
    ]
    return [part for pair in zip(parts, exact, strict=True) for part in pair]


def _try(exchange: Exchange, name: str, pattern: Pattern, *, exact: bool, steps: Iterator[int]) -> None:
    device, rank = exchange.device, exchange.rank
    num_tokens, slots = pattern(rank, exchange.num_ranks, exchange.slots_per_rank, exchange.top_k)
    slots_TK = torch.tensor(slots, dtype=torch.int64, device=device).view(num_tokens, exchange.top_k)
    values_T = 1.0 + torch.arange(num_tokens, device=device) + TOKENS * (rank % 4)
    x_TD = values_T.unsqueeze(1).expand(num_tokens, exchange.hidden).to(exchange.dtype)
    weights_TK = torch.full(slots_TK.shape, 0.25, dtype=wide(exchange.dtype), device=device)
    terms, parts = Terms(bucket=TOKENS, exact=exact), []
    for number, part in enumerate(exchange.round_slices(num_tokens, terms)):
        tag = Tag(next(steps), 0, 0, number, Kind.CHECK)
        arrivals = exchange.dispatch(x_TD[part], slots_TK[part], weights_TK[part], tag=tag, terms=terms).wait()
        parts.append((_sums(arrivals), exchange.combine(_experts(exchange, arrivals), arrivals, tag=tag).wait()))
    overflow = exchange.take_overflow()
    back_TD = torch.cat([out for _, out in parts])
    if overflow is not None and not exact:
        return  # rows may have been left behind, as agreed; what arrives exactly is looked at next
    heard = [sum(numbers) for numbers in zip(*(sums for sums, _ in parts), strict=True)]
    _compare_arrivals(exchange, name, pattern, heard)
    _compare_sums(exchange, name, slots_TK, values_T, back_TD)


def _experts(exchange: Exchange, arrivals: Arrivals) -> Tensor:
    """What the experts make of the pairs: row times 1 + slot % 3."""
    slots_M = arrivals.slots_M + exchange.rank * exchange.slots_per_rank
    return arrivals.x_ND[arrivals.rows_M] * (1 + slots_M % 3).unsqueeze(1).to(exchange.dtype)


def _sums(arrivals: Arrivals) -> tuple[float, float, float]:
    """(pairs, sum of their slots, sum of their rows' first and last values)."""
    ends_M2 = arrivals.x_ND[:, [0, -1]][arrivals.rows_M].double()
    return float(arrivals.rows_M.shape[0]), float(arrivals.slots_M.sum()), float(ends_M2.sum())


def _compare_arrivals(exchange: Exchange, name: str, pattern: Pattern, heard: Sequence[float]) -> None:
    first = exchange.rank * exchange.slots_per_rank
    pairs = slot_sum = value_sum = 0.0
    for source in range(exchange.num_ranks):
        tokens, slots = pattern(source, exchange.num_ranks, exchange.slots_per_rank, exchange.top_k)
        for place, slot in enumerate(slots):
            if first <= slot < first + exchange.slots_per_rank:
                pairs += 1
                slot_sum += slot - first
                value_sum += 2 * (1 + place // (len(slots) // tokens) + TOKENS * (source % 4))
    for what, expected, found in zip(
        ("pairs that arrived", "sum of their slots", "sum of their rows"),
        (pairs, slot_sum, value_sum),
        heard,
        strict=True,
    ):
        if not abs(found - expected) <= TOLERANCE * abs(expected):  # also for NaN
            raise SelfTestFailed(name, what, expected, found, rank=exchange.rank)


def _compare_sums(exchange: Exchange, name: str, slots_TK: Tensor, values_T: Tensor, back_TD: Tensor) -> None:
    factors_TK = (1 + slots_TK % 3).double().masked_fill(slots_TK < 0, 0.0)
    expected_TD = (0.25 * values_T.double() * factors_TK.sum(1)).unsqueeze(1).expand(-1, exchange.hidden)
    wrong_TD = ~((back_TD.double() - expected_TD).abs() <= TOLERANCE * expected_TD.abs())  # also for NaN
    if wrong_TD.any():
        token, column = wrong_TD.nonzero()[0].tolist()
        what = f"token {token}, column {column} that came back"
        raise SelfTestFailed(
            name, what, expected_TD[token, column].item(), back_TD[token, column].item(), rank=exchange.rank
        )
