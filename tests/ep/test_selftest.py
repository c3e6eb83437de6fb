"""The self-test passes what is right in every mode, is quick, and names pattern and rank of what is not."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from ep import CapacityPlan, run_ranks
from ep.rows import RowFormat
from ep.selftest import PATTERNS, SelfTestFailed, self_test

LIMIT_S = 20
FIRST_VALUE = RowFormat(1, torch.float32, 32).begins[3]
MODES = list(itertools.product(("exact", "bounded"), ("off", "on"), ("ranks", "slots")))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("dtypes", [(torch.float64, "run"), (torch.bfloat16, "fp8")], ids=str)
def test_what_is_right_passes_in_every_mode(make, mode, dtypes):
    exchange, hierarchical, combine = mode

    def fn(transport):
        built = make(
            transport,
            num_slots=12,
            hidden=130,
            top_k=3,
            node_size=2,
            exchange=exchange,
            hierarchical=hierarchical,
            combine=combine,
            dtype=dtypes[0],
            dispatch_dtype=dtypes[1],
            round_tokens=2,
        )
        self_test(built)
        return built.take_bytes()

    assert run_ranks(4, fn, timeout_s=LIMIT_S) == [(0, 0)] * 4


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_ranks_and_blocks_that_are_too_small_pass(make, size):
    def fn(transport):
        plan = CapacityPlan.fixed(1, combine=1)
        self_test(make(transport, num_slots=3 * size, exchange="bounded", combine="slots", plan=plan))

    run_ranks(size, fn, timeout_s=LIMIT_S)


def test_it_takes_no_longer_than_a_blink(make):
    """Of 4 ranks with rows as wide as DeepSeek-V3's; the best of three."""

    def fn(transport):
        built = make(transport, num_slots=64, hidden=7168, top_k=8, dtype=torch.bfloat16, exchange="bounded")
        begin = time.thread_time()
        self_test(built)
        return time.thread_time() - begin

    assert min(sum(run_ranks(4, fn, timeout_s=LIMIT_S)) for _ in range(3)) < 0.2


class Spoiling:
    """A transport that changes a byte of every message that rank 1 gets, at this place of every row."""

    def __init__(self, inner, place):
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._place = inner, place

    def all_to_all(self, recv, send, **how):
        def spoil(rows):
            if self.rank == 1 and rows.dtype is torch.uint8:
                rows[:, self._place] ^= 0x40
            return rows

        return self._inner.all_to_all(recv, send, **how).then(spoil)


@pytest.mark.parametrize(
    ("place", "what"), [(8, "pairs that arrived|sum of their slots"), (FIRST_VALUE + 3, "sum of their rows")]
)
def test_rows_that_are_spoilt_on_the_way_are_found_and_named(make, place, what):
    def fn(transport):
        built = make(Spoiling(transport, place), num_slots=66, hidden=8, top_k=1, dtype=torch.float32)
        self_test(built)

    message = rf"^rank 1: self-test of the exchange, pattern 'spread': ({what}): expected .*, found "
    with pytest.raises(SelfTestFailed, match=message):
        run_ranks(3, fn, timeout_s=LIMIT_S)


def test_sums_that_come_back_wrong_are_found_and_named(make):
    def fn(transport):
        built = make(transport, num_slots=6, hidden=8, top_k=2)
        combine = built.combine
        built.combine = lambda y, arrivals, tag: combine(y, arrivals, tag=tag).then(
            lambda out: out + (transport.rank == 2)
        )
        self_test(built)

    with pytest.raises(SelfTestFailed, match=r"^rank 2: .*'spread': token 0, column 0 that came back: expected"):
        run_ranks(3, fn, timeout_s=LIMIT_S)


def test_the_patterns_have_masked_slots_idle_ranks_and_everything_to_one_slot():
    slots = {name: [pattern(rank, 2, 4, 2)[1] for rank in (0, 1)] for name, pattern in PATTERNS.items()}
    assert -1 in slots["some masked"][0]
    assert slots["one rank idle"][0] == []
    assert set(slots["one slot"][0] + slots["one slot"][1]) == {7}
