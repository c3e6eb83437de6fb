"""Ranks, nodes and rails by hand; a node size that does not divide the ranks is refused in words."""

from __future__ import annotations

import pytest

from ep import Topology


def test_eight_ranks_on_four_nodes_by_hand():
    topology = Topology(num_ranks=8, node_size=2)
    assert topology.num_nodes == 4
    assert [topology.node_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [topology.local_of(rank) for rank in range(8)] == [0, 1] * 4
    assert list(topology.node_members(5)) == [4, 5]
    assert list(topology.rail_members(5)) == [1, 3, 5, 7]


@pytest.mark.parametrize(("num_ranks", "node_size"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (12, 4)])
def test_nodes_and_rails_each_hold_every_rank_once(num_ranks, node_size):
    topology = Topology(num_ranks=num_ranks, node_size=node_size)
    for members in (topology.node_members, topology.rail_members):
        parts = {tuple(members(rank)) for rank in range(num_ranks)}
        assert sorted(rank for part in parts for rank in part) == list(range(num_ranks))
        assert all(rank in members(rank) for rank in range(num_ranks))


@pytest.mark.parametrize(
    ("num_ranks", "node_size", "message"),
    [
        (8, 3, "node_size = 3: must divide the number of ranks, 8; for example 2"),
        (6, 12, "node_size = 12: must divide the number of ranks, 6; for example 6"),
        (4, 0, "node_size = 0: must divide the number of ranks, 4; for example 1"),
        (0, 1, "num_ranks = 0: must be at least 1, for example 1"),
    ],
)
def test_nodes_that_are_not_equal_are_refused_in_words(num_ranks, node_size, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Topology(num_ranks=num_ranks, node_size=node_size)
