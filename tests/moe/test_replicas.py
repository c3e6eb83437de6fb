"""Shares of copies: own first, then near, then far; and no copy carries much more than another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.replicas import NEAR_LIMIT, copy_shares


def shares_of(slots: list[list[int]], *, num_ranks: int, slots_per_rank: int, node_size: int = 1) -> np.ndarray:
    """[R, E, X] of all ranks."""
    most = max(len(row) for row in slots)
    slots_EX = np.array([row + [-1] * (most - len(row)) for row in slots])
    how = {"num_ranks": num_ranks, "slots_per_rank": slots_per_rank, "node_size": node_size}
    return np.stack([copy_shares(slots_EX, rank=rank, **how) for rank in range(num_ranks)])


def test_a_rank_that_holds_a_copy_keeps_its_tokens() -> None:
    shares = shares_of([[1, 4]], num_ranks=4, slots_per_rank=2)  # copies on ranks 0 and 2
    assert shares[:, 0].tolist() == [[1, 0], [0.5, 0.5], [0, 1], [0.5, 0.5]]


def test_two_copies_on_one_rank_halve_what_it_keeps() -> None:
    assert shares_of([[0, 1]], num_ranks=2, slots_per_rank=2)[:, 0].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_node_without_copies_fills_what_the_others_leave() -> None:
    """6 ranks on 3 nodes, copies on ranks 0 and 2: two nodes serve themselves, the third has 1/6 for each copy."""
    shares = shares_of([[0, 2]], num_ranks=6, slots_per_rank=1, node_size=2)[:, 0]
    assert shares[:4].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert shares[4:] == pytest.approx(0.5)


def test_nearness_gives_way_where_a_copy_would_carry_too_much() -> None:
    """8 ranks on 2 nodes, 3 copies, all but one on the second node: the first copy may take 1.05 / 3 and no more."""
    shares = shares_of([[0, 4, 5]], num_ranks=8, slots_per_rank=1, node_size=4)[:, 0]
    carried = shares.mean(axis=0)
    assert carried[0] == pytest.approx(NEAR_LIMIT / 3)
    assert shares[0].tolist() == [1, 0, 0]
    assert 0.5 < shares[1, 0] < 1


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[list[int]], int, int, int]:
    """(slots of each expert, ranks, slots a rank, node size), at most one copy on a rank."""
    node_size = draw(st.integers(1, 4))
    num_ranks = draw(st.integers(1, 12))
    rows = draw(st.lists(st.sets(st.integers(0, num_ranks - 1), min_size=1), min_size=1, max_size=4))
    slots_per_rank = len(rows)
    return (
        [[r * slots_per_rank + e for r in sorted(ranks)] for e, ranks in enumerate(rows)],
        num_ranks,
        slots_per_rank,
        node_size,
    )


@given(placements())
@settings(deadline=None, max_examples=300)
def test_copies_share_within_the_limit_and_no_token_is_lost(given_: tuple[list[list[int]], int, int, int]) -> None:
    slots, num_ranks, slots_per_rank, node_size = given_
    shares = shares_of(slots, num_ranks=num_ranks, slots_per_rank=slots_per_rank, node_size=node_size)
    assert shares.sum(axis=2) == pytest.approx(1.0)
    assert shares.min() >= 0
    for expert, row in enumerate(slots):
        carried = shares[:, expert, : len(row)].mean(axis=0)
        assert carried.max() <= NEAR_LIMIT / len(row) + 1e-9
        assert shares[:, expert, len(row) :].sum() == 0
        for copy, slot in enumerate(row):
            assert shares[slot // slots_per_rank, expert, copy] == 1.0
