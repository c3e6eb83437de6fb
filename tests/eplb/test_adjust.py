"""Few changes that relieve the fullest rank: what is said of a change is what it does."""

import numpy as np
import pytest

from eplb.adjust import Bins, relieve
from eplb.packing import loads_of, shares, whole_weights
from moe import spread


def start(loads: np.ndarray, num_ranks: int, num_redundant: int) -> Bins:
    """As at the start of a run: experts in order, then the first once more."""
    num_experts = loads.shape[1]
    placement = spread(num_experts, num_ranks, num_redundant)
    slots = np.array(placement.slot_experts)
    slots = np.where(slots < 0, num_experts, slots).reshape(num_ranks, -1)
    counts = np.bincount(slots.ravel(), minlength=num_experts + 1)
    counts[-1] = 0
    return Bins(
        weights_BZ=whole_weights(loads),
        counts_BZ=np.repeat(counts[None], len(loads), axis=0),
        slots_BRL=np.repeat(slots[None], len(loads), axis=0),
    )


def check(bins: Bins) -> None:
    empty = bins.weights_BZ.shape[1] - 1
    for slots, counts in zip(bins.slots_BRL, bins.counts_BZ, strict=True):
        held = [expert for expert in slots.ravel().tolist() if expert != empty]
        assert np.bincount(held, minlength=empty).tolist() == counts[:-1].tolist()
        assert counts[:-1].min() >= 1
        for rank in slots.tolist():
            real = [expert for expert in rank if expert != empty]
            assert len(set(real)) == len(real)


@pytest.mark.parametrize(("num_ranks", "num_redundant"), [(1, 0), (2, 3), (8, 0), (8, 8), (7, 3), (20, 21)])
def test_every_single_change_lowers_the_fullest_rank_or_its_number(num_ranks: int, num_redundant: int) -> None:
    rng = np.random.default_rng(num_ranks)
    bins = start(np.exp(rng.normal(size=(5, 30))), num_ranks, num_redundant)
    first = bins.loads_BR.max(axis=1)
    for _ in range(60):
        before, slots = np.sort(bins.loads_BR, axis=1)[:, ::-1], bins.slots_BRL.copy()
        relieve(bins, target_B=np.zeros(5), steps=1)
        check(bins)
        after = np.sort(bins.loads_BR, axis=1)[:, ::-1]
        changed = (bins.slots_BRL != slots).sum(axis=(1, 2))
        assert set(changed.tolist()) <= {0, 1, 2}  # nothing, one more copy, or a swap
        for one, other in zip(after[changed > 0].tolist(), before[changed > 0].tolist(), strict=True):
            assert one < other  # as lists: the largest, then the next
    if num_ranks > 1:
        assert (bins.loads_BR.max(axis=1) < 0.99 * first).sum() >= 4


def test_an_expert_that_is_too_hot_gets_the_slot_of_a_copy_nobody_needs() -> None:
    """Expert 0 has all the load, the copy is of expert 1."""
    bins = Bins(
        weights_BZ=whole_weights(np.array([[90.0, 5, 5]])),
        counts_BZ=np.array([[1, 2, 1, 0]]),
        slots_BRL=np.array([[[0, 1], [2, 1]]]),
    )
    relieve(bins, target_B=np.zeros(1), steps=1)
    assert bins.slots_BRL.tolist() == [[[0, 1], [2, 0]]]
    assert bins.counts_BZ.tolist() == [[2, 1, 1, 0]]


def test_nothing_changes_at_or_below_the_target() -> None:
    bins = start(np.array([[4.0, 3, 2, 1], [1, 1, 1, 1]]), 2, 0)
    before = bins.slots_BRL.copy()
    relieve(bins, target_B=bins.loads_BR.max(axis=1), steps=9)
    assert np.array_equal(bins.slots_BRL, before)


def test_thrift_takes_the_single_copy_where_a_swap_lowers_little_more() -> None:
    rng = np.random.default_rng(4)
    loads = np.exp(rng.normal(size=(40, 32)))
    fetched = []
    for thrift in (0.0, 1.0):
        bins = start(loads, 8, 8)
        old = bins.slots_BRL.copy()
        relieve(bins, target_B=1.1 * bins.loads_BR.mean(axis=1), steps=40, thrift=thrift)
        check(bins)
        fetched.append(int((bins.slots_BRL != old).sum()))
    assert fetched[1] < fetched[0]


def test_a_zero_load_stays_as_it_is() -> None:
    bins = start(np.zeros((1, 6)), 3, 1)
    before = bins.slots_BRL.copy()
    relieve(bins, target_B=np.zeros(1), steps=5)
    assert np.array_equal(bins.slots_BRL, before)
    assert loads_of(shares(bins.weights_BZ, bins.counts_BZ), bins.slots_BRL).tolist() == [[0.0, 0.0, 0.0]]
