"""Copies into slots: counts, first packing, levelling; against loops and exhaustive search."""

from itertools import combinations_with_replacement, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.packing import exchanges, level, loads_of, pack, part_twins, replicate, shares, whole_weights


def packed(
    loads: np.ndarray, extra: np.ndarray, num_ranks: int, slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights = whole_weights(loads)
    counts = replicate(weights, extra, most=num_ranks, greed="largest")
    parts = shares(weights, counts)
    return parts, counts, pack(parts, counts, num_ranks=num_ranks, slots_per_rank=slots)


def assert_sound(slots_BRL: np.ndarray, counts_BZ: np.ndarray) -> None:
    """Every copy has a slot, and no rank holds two copies of an expert."""
    empty = counts_BZ.shape[1] - 1
    for slots_RL, counts_Z in zip(slots_BRL, counts_BZ, strict=True):
        held = [expert for expert in slots_RL.ravel().tolist() if expert != empty]
        assert np.bincount(held, minlength=empty).tolist() == counts_Z[:-1].tolist()
        for rank in slots_RL.tolist():
            real = [expert for expert in rank if expert != empty]
            assert len(set(real)) == len(real), rank


def test_copies_go_to_the_largest_share_one_by_one() -> None:
    weights = np.array([[6.0, 3, 1, 0], [1, 1, 1, 0]])
    assert replicate(weights, np.array([3, 1]), most=9, greed="largest").tolist() == [[3, 2, 1, 0], [2, 1, 1, 0]]
    assert replicate(weights, np.array([3, 1]), most=2, greed="largest").tolist() == [[2, 2, 2, 0], [2, 1, 1, 0]]


def test_saving_gives_copies_as_square_roots_of_loads() -> None:
    weights = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10, 0]])
    counts = replicate(weights, np.array([8]), most=8, greed="saving")
    assert counts.tolist() == [[4, 4, 2, 2, 1, 1, 1, 1, 0]]
    best = min(
        sum(weights[0, e] / (1 + extra.count(e)) for e in range(8))
        for extra in combinations_with_replacement(range(8), 8)
    )
    assert (weights[0, :-1] / counts[0, :-1]).sum() == pytest.approx(best)


def test_no_extra_copies_and_no_experts_to_spare() -> None:
    assert replicate(np.array([[2.0, 1, 0]]), np.array([0]), most=4, greed="largest").tolist() == [[1, 1, 0]]
    assert replicate(np.zeros((0, 3)), np.zeros(0, np.int64), most=4, greed="largest").shape == (0, 3)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_any_packing_is_sound(data: st.DataObject) -> None:
    num_ranks, num_experts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    num_rows = data.draw(st.integers(1, 3))
    row = st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 100, 10**9]), min_size=num_experts, max_size=num_experts)
    loads = np.array([data.draw(row) for _ in range(num_rows)], np.float64)
    extra = np.array([data.draw(st.integers(0, num_experts * (num_ranks - 1))) for _ in range(num_rows)])
    slots = -(-int(num_experts + extra.max()) // num_ranks) + data.draw(st.integers(0, 1))
    parts, counts, placed = packed(loads, extra, num_ranks, slots)
    assert_sound(placed, counts)
    assert counts[:, :-1].sum(axis=1).tolist() == (num_experts + extra).tolist()
    before = loads_of(parts, placed)
    level(parts, placed, target_B=np.zeros(num_rows), rounds=30)
    assert_sound(placed, counts)
    assert (loads_of(parts, placed).max(axis=1) <= before.max(axis=1)).all()


def test_a_small_packing_is_within_a_third_of_the_best_and_levelling_gets_nearer() -> None:
    """Falling order, least loaded first, is at most 4/3 of the optimum (Graham 1969)."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        loads = rng.integers(1, 100, size=(1, 6)).astype(np.float64)
        parts, _, placed = packed(loads, np.array([0]), 3, 2)
        best = min(max(sum(parts[0, list(order[i : i + 2])]) for i in (0, 2, 4)) for order in permutations(range(6)))
        first = loads_of(parts, placed).max()
        level(parts, placed, target_B=np.zeros(1), rounds=30)
        ratios.append((first / best, loads_of(parts, placed).max() / best))
    assert max(first for first, _ in ratios) <= 4 / 3
    assert np.mean([last for _, last in ratios]) <= np.mean([first for first, _ in ratios])
    assert np.mean([last for _, last in ratios]) < 1.01


def test_two_copies_on_one_rank_are_parted() -> None:
    slots = np.array([[[0, 0], [1, 1], [2, 3]]])
    parts = np.array([[5.0, 4, 3, 2, 0]])
    part_twins(parts, slots)
    assert_sound(slots, np.array([[2, 2, 1, 1, 0]]))


def test_a_packing_that_gets_stuck_is_mended() -> None:
    """Expert 0 keeps rank 0 heavy and rank 1 is filled first: both copies of expert 4 are left for rank 0."""
    parts, counts = np.array([[100.0, 5, 5, 5, 1, 0]]), np.array([[1, 1, 1, 1, 2, 0]])
    placed = pack(parts, counts, num_ranks=2, slots_per_rank=3)
    assert_sound(placed, counts)
    assert loads_of(parts, placed).tolist() == [[106.0, 11.0]]


def test_a_rank_below_the_target_gives_nothing_away() -> None:
    parts = np.array([[8.0, 5, 4, 1, 0]])
    slots = np.array([[[0, 1], [2, 3]]])
    kept = slots.copy()
    level(parts, kept, target_B=np.array([13.0]), rounds=9)
    assert np.array_equal(kept, slots)
    level(parts, kept, target_B=np.array([12.0]), rounds=9)
    assert loads_of(parts, kept).max() == 9


def test_only_ranks_above_the_target_are_relieved() -> None:
    """Rank 0 is above it and swaps with rank 3; rank 1 is not, though a swap with rank 2 would level the two."""
    parts = np.array([[12.0, 8, 7, 5, 3, 1, 1, 0, 0]])
    slots = np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]])
    level(parts, slots, target_B=np.array([15.0]), rounds=1)
    assert slots[0, 1:3].tolist() == [[2, 3], [4, 5]]
    assert loads_of(parts, slots)[0].tolist() == [9.0, 12.0, 4.0, 12.0]


def test_exchanges_keep_the_number_of_copies_and_the_limit() -> None:
    weights = np.array([[9.0, 5, 2, 1, 0], [1, 1, 1, 1, 0]])
    counts = np.array([[3, 2, 1, 1, 0], [1, 1, 1, 1, 0]])
    tried = list(exchanges(weights, counts, most=3))
    assert len(tried) == 16
    for other in tried:
        assert other.sum(axis=1).tolist() == [7, 4]
        assert other[:, :-1].min() == 1
        assert other.max() <= 3
    assert {tuple(other[0].tolist()) for other in tried} > {(2, 3, 1, 1, 0), (3, 1, 2, 1, 0)}
    assert all(other[1].tolist() == [1, 1, 1, 1, 0] for other in tried)  # nobody has a copy to spare
