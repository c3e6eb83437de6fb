"""New bins on old ranks, and experts in their slots: nothing is lost, and little moves."""

from itertools import permutations

import numpy as np
import pytest

from eplb.matching import keep_slots, match, relabel


def moves(new: np.ndarray, old: np.ndarray, empty: int) -> int:
    return sum(
        len(set(there.tolist()) - set(here.tolist()) - {empty})
        for new_RL, old_RL in zip(new, old, strict=True)
        for there, here in zip(new_RL, old_RL, strict=True)
    )


def random_slots(rng: np.random.Generator, rows: int, ranks: int, local: int, experts: int) -> np.ndarray:
    return np.array([[rng.permutation(experts + 1)[:local] for _ in range(ranks)] for _ in range(rows)])


def test_as_drawn_in_its_docstring() -> None:
    kept = keep_slots(np.array([[[1, 9, 4, 3]]]), np.array([[[4, 7, 1, 10]]]), num_experts=10)
    assert kept.tolist() == [[[4, 9, 1, 3]]]


@pytest.mark.parametrize(("ranks", "local", "experts"), [(1, 1, 1), (1, 5, 7), (4, 3, 12), (5, 2, 3), (3, 40, 64)])
def test_experts_stay_on_their_rank_and_in_their_slot(ranks: int, local: int, experts: int) -> None:
    rng = np.random.default_rng(ranks)
    local = min(local, experts + 1)
    new, old = [random_slots(rng, 6, ranks, local, experts) for _ in range(2)]
    kept = keep_slots(new, old, num_experts=experts)
    assert np.array_equal(np.sort(kept, axis=2), np.sort(new, axis=2))
    both = (old[..., :, None] == new[..., None, :]).any(axis=3) & (old != experts)
    assert np.array_equal(kept[both], old[both])


def test_an_old_rank_with_two_copies_keeps_one_of_them() -> None:
    assert keep_slots(np.array([[[7, 3]]]), np.array([[[3, 3]]]), num_experts=9).tolist() == [[[3, 7]]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_matching_is_nearly_as_good_as_trying_every_order(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    new, old = [random_slots(rng, 40, ranks, 3, 9) for _ in range(2)]
    order = match(new, old, num_experts=9)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(ranks), (40, 1)))
    matched = moves(np.take_along_axis(new, order[:, :, None], axis=1), old, 9)
    best = sum(
        min(moves(new[row : row + 1, list(each)], old[row : row + 1], 9) for each in permutations(range(ranks)))
        for row in range(40)
    )
    assert best <= matched <= 1.02 * best


def test_a_shuffled_placement_is_recognised() -> None:
    rng = np.random.default_rng(1)
    old = np.arange(64).reshape(1, 16, 4)
    new = rng.permuted(old[:, rng.permutation(16)], axis=2)
    assert np.array_equal(relabel(new, old, num_experts=64), old)


def test_the_bins_of_a_node_stay_together() -> None:
    old = np.arange(32).reshape(1, 8, 4)
    new = old.reshape(1, 2, 4, 4)[:, ::-1, ::-1].reshape(1, 8, 4).copy()
    new[0, 0, 0], new[0, 5, 1] = new[0, 5, 1], new[0, 0, 0]  # one expert on the wrong node
    done = relabel(new, old, num_experts=32, num_nodes=2)
    assert {frozenset(half.tolist()) for half in done.reshape(2, 16)} == {
        frozenset(half.tolist()) for half in new.reshape(2, 16)
    }
    assert moves(done, old, 32) == 2
