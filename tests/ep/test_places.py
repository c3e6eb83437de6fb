"""Blocks of a fixed size against loops over layouts of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep.layout import own_slots
from ep.places import come_back, dense_places, given_back, row_places
from ep.reference import loop_pairs, loop_send_tokens


def test_row_places_by_hand():
    """Two members of two slots, two places each: rows 0, 1 and 2 to member 0, row 2 to member 1."""
    slots_TK = torch.tensor([[0, -1], [1, 0], [0, 3]])
    places = row_places(slots_TK, slots_per_member=2, num_members=2, capacity=2)
    assert places.rows_P.tolist() == [3, 0, 1, 3, 2, 3]
    assert places.fits_TR.tolist() == [[True, False], [True, False], [False, True]]
    assert places.counts_R.tolist() == [2, 1]
    assert places.overflow
    assert not row_places(slots_TK, slots_per_member=2, num_members=2, capacity=3).overflow


def test_pairs_given_back_by_hand():
    """Two members whose blocks landed as two rows each; the second row of each is nothing."""
    index_NK = torch.tensor([[0, 1], [-1, -1], [-1, 2], [-1, -1]])
    index_P, overflow = given_back(index_NK, num_members=2, capacity=2)
    assert (index_P.tolist(), bool(overflow)) == ([0, 0, 1, 0, 2, 0], False)
    index_P, overflow = given_back(index_NK, num_members=2, capacity=1)
    assert (index_P.tolist(), bool(overflow)) == ([0, 0, 0, 2], True)


@st.composite
def routings(draw):
    """(slots_TK, slots per member, members, capacity): -1s and the same slot twice included."""
    num_members, slots_per_member = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_tokens, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    slot = st.integers(-1, num_members * slots_per_member - 1)
    rows = draw(st.lists(st.lists(slot, min_size=top_k, max_size=top_k), min_size=num_tokens, max_size=num_tokens))
    slots_TK = torch.tensor(rows, dtype=torch.int64).view(num_tokens, top_k)
    return slots_TK, slots_per_member, num_members, draw(st.integers(1, 8))


@given(routings())
def test_a_block_holds_the_first_rows_of_its_member(routing):
    slots_TK, slots_per_member, num_members, capacity = routing
    places = row_places(slots_TK, slots_per_member=slots_per_member, num_members=num_members, capacity=capacity)
    expected = loop_send_tokens(slots_TK, slots_per_rank=slots_per_member, num_ranks=num_members)
    nothing = slots_TK.shape[0]
    for block, rows in zip(places.rows_P.view(num_members, -1).tolist(), expected, strict=True):
        assert block == [nothing, *rows[:capacity], *[nothing] * (capacity - len(rows))]
    assert places.counts_R.tolist() == [min(len(rows), capacity) for rows in expected]
    assert bool(places.overflow) == any(len(rows) > capacity for rows in expected)


@given(routings(), st.integers(1, 20))
def test_every_pair_that_fitted_both_ways_is_found_again(routing, back):
    """All members in one loop: their blocks go there and back, and pair (t, k) comes back where it is looked for."""
    slots_TK, slots_per_member, num_members, capacity = routing
    sizes = {"slots_per_member": slots_per_member, "num_members": num_members}
    places = row_places(slots_TK, capacity=capacity, **sizes)
    came_back = []
    for member, block_P in enumerate(places.rows_P.view(num_members, -1)):
        padded = torch.cat([slots_TK, torch.full((1, slots_TK.shape[1]), -1)])
        own_NK = own_slots(padded[block_P], member=member, slots_per_member=slots_per_member)
        pair_NK = (block_P[:, None] * slots_TK.shape[1] + torch.arange(slots_TK.shape[1])).where(own_NK >= 0, -1)
        index_P, overflow = given_back(pair_NK, num_members=1, capacity=back)
        num_pairs = int((own_NK >= 0).sum())
        assert bool(overflow) == (num_pairs > back)
        came_back.append(index_P)
    found_TK = come_back(slots_TK, places.fits_TR, slots_per_member=slots_per_member, capacity=back)
    expected = torch.full_like(slots_TK, -1)
    for member, pairs in enumerate(loop_pairs(slots_TK, slots_per_rank=slots_per_member, num_ranks=num_members)):
        sent = [(token, k) for token, k in pairs if places.fits_TR[token, member]]
        for token, k in sent[:back]:
            expected[token, k] = token * slots_TK.shape[1] + k
    pairs_P = torch.cat(came_back)
    found = pairs_P[found_TK.clamp(min=0)].where(found_TK >= 0, -1)
    assert torch.equal(found, expected)


def test_dense_places_are_those_of_the_docstring():
    slots_TK = torch.tensor([[0, 1], [0, 3], [-1, 2]])
    places = dense_places(slots_TK, slots_per_member=2, num_members=2, num_places=7)
    assert places.rows_P.tolist() == [3, 0, 1, 3, 1, 2, 3]
    assert (places.lengths_R.tolist(), places.begin_R.tolist()) == ([3, 3], [0, 3])
    assert places.back_TJ.tolist() == [[1, -1], [2, 4], [5, -1]]


@pytest.mark.parametrize("num_rows", [0, 1, 13])
def test_dense_places_have_the_rows_of_padded_ones_in_the_same_order_without_the_padding(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    slots_TK = torch.randint(-1, 10, (num_rows, 4), generator=generator)
    sizes = {"slots_per_member": 2, "num_members": 5}
    padded = row_places(slots_TK, capacity=num_rows, **sizes)
    dense = dense_places(slots_TK, num_places=5 + 4 * num_rows, **sizes)
    blocks = padded.rows_P.view(5, 1 + num_rows).tolist()
    ends = (dense.begin_R + dense.lengths_R).tolist()
    found = [dense.rows_P[begin:end].tolist() for begin, end in zip(dense.begin_R.tolist(), ends, strict=True)]
    counts = padded.counts_R.tolist()
    assert found == [block[: 1 + count] for block, count in zip(blocks, counts, strict=True)]
    assert dense.begin_R.tolist() == [0, *ends[:-1]]
    assert (dense.rows_P[ends[-1] :] == num_rows).all()
    for row, back in enumerate(dense.back_TJ.tolist()):
        assert all(dense.rows_P[place] == row for place in back if place >= 0)
        assert sum(place >= 0 for place in back) == sum(place >= 0 for place in padded.back_TJ[row].tolist())
