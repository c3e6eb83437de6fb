"""Index math against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep.layout import local_pairs, own_slots, pair_order, pair_splits, ranks_of, send_layout
from ep.reference import loop_pairs, loop_send_tokens


def test_send_layout_by_hand():
    slots_TK = torch.tensor([[0, 3], [2, 3], [-1, 1]])
    layout = send_layout(slots_TK, slots_per_rank=2, num_ranks=2)
    assert (layout.tokens_N.tolist(), layout.splits) == ([0, 2, 0, 1], [2, 2])


def test_own_slots_by_hand():
    slots_NK = torch.tensor([[0, 3], [3, 2], [-1, 1]])
    assert own_slots(slots_NK, member=1, slots_per_member=2).tolist() == [[-1, 1], [1, 0], [-1, -1]]
    assert own_slots(slots_NK, member=0, slots_per_member=2).tolist() == [[0, -1], [-1, -1], [-1, 1]]


def test_local_pairs_by_hand():
    pairs = local_pairs(torch.tensor([[-1, 1], [1, 0]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    assert (pairs.rows_M.tolist(), pairs.slots_M.tolist()) == ([0, 1, 1], [1, 1, 0])
    assert torch.equal(pairs.weights_M, torch.tensor([0.2, 0.3, 0.4]))


def test_pair_order_by_hand():
    assert pair_order(torch.tensor([[3, 0], [1, -1]]), slots_per_rank=2).tolist() == [[2, 0], [1, -1]]


def test_no_slot_has_no_rank():
    assert ranks_of(torch.tensor([[-1, 0, 2, 3]]), 3).tolist() == [[-1, 0, 0, 1]]
    assert ranks_of(torch.tensor([[-1, 0, 1]]), 1).tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("shape", [(0, 1), (0, 16), (3, 1)])
def test_nothing_to_send_is_an_ordinary_layout(shape):
    slots_TK = torch.full(shape, -1)
    layout = send_layout(slots_TK, slots_per_rank=2, num_ranks=3)
    assert (layout.tokens_N.tolist(), layout.splits) == ([], [0, 0, 0])
    assert pair_splits(slots_TK, slots_per_rank=2, num_ranks=3) == [0, 0, 0]
    pairs = local_pairs(own_slots(slots_TK, member=0, slots_per_member=2), torch.zeros(shape))
    assert pairs.rows_M.shape == pairs.slots_M.shape == pairs.weights_M.shape == (0,)
    assert torch.equal(pair_order(slots_TK, slots_per_rank=2), slots_TK)


@st.composite
def routings(draw):
    """(slots_TK, slots per rank, ranks): -1s and the same slot twice included."""
    num_ranks, slots_per_rank = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    num_tokens, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    slot = st.integers(-1, num_ranks * slots_per_rank - 1)
    rows = draw(st.lists(st.lists(slot, min_size=top_k, max_size=top_k), min_size=num_tokens, max_size=num_tokens))
    return torch.tensor(rows, dtype=torch.int64).view(num_tokens, top_k), slots_per_rank, num_ranks


@given(routings())
def test_a_token_goes_once_to_each_rank_that_has_a_slot_of_it(routing):
    slots_TK, slots_per_rank, num_ranks = routing
    layout = send_layout(slots_TK, slots_per_rank=slots_per_rank, num_ranks=num_ranks)
    expected = loop_send_tokens(slots_TK, slots_per_rank=slots_per_rank, num_ranks=num_ranks)
    assert [part.tolist() for part in layout.tokens_N.split(layout.splits)] == expected


@given(routings())
def test_every_pair_is_computed_once_on_its_rank_and_found_again(routing):
    slots_TK, slots_per_rank, num_ranks = routing
    ids_TK = torch.arange(slots_TK.numel(), dtype=torch.float64).view(slots_TK.shape)  # stand in for weights
    expected = loop_pairs(slots_TK, slots_per_rank=slots_per_rank, num_ranks=num_ranks)
    assert pair_splits(slots_TK, slots_per_rank=slots_per_rank, num_ranks=num_ranks) == [len(part) for part in expected]
    computed = []
    for rank, part in enumerate(expected):
        pairs = local_pairs(own_slots(slots_TK, member=rank, slots_per_member=slots_per_rank), ids_TK)
        assert pairs.rows_M.tolist() == [token for token, _ in part]
        assert (pairs.slots_M + rank * slots_per_rank).tolist() == [int(slots_TK[place]) for place in part]
        assert pairs.weights_M.tolist() == [float(ids_TK[place]) for place in part]
        computed.append(pairs.weights_M)
    index_TK = pair_order(slots_TK, slots_per_rank=slots_per_rank)
    assert torch.equal(index_TK < 0, slots_TK < 0)
    assert torch.equal(torch.cat(computed)[index_TK[index_TK >= 0]], ids_TK[slots_TK >= 0])
