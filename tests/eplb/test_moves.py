"""Moves held against a simple picture: experts in slots, copied one by one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.moves import CELL_BYTES, CHECKPOINT, LayerMoves, Speeds, cut, diff, piece_cells, portion, settle_in
from moe import ExpertPlacement


def placement(num_ranks: int, slots_per_rank: int, num_experts: int, rng: random.Random) -> ExpertPlacement:
    """Any experts anywhere, each at least once, some slots empty; a rank may hold an expert twice."""
    num_slots = num_ranks * slots_per_rank
    rest = [rng.randrange(-1, num_experts) for _ in range(num_slots - num_experts)]
    slots = [*range(num_experts), *rest]
    rng.shuffle(slots)
    return ExpertPlacement(num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_experts=tuple(slots))


@st.composite
def changes(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement]:
    num_ranks, slots_per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    num_experts = draw(st.integers(1, num_ranks * slots_per_rank))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    return tuple(placement(num_ranks, slots_per_rank, num_experts, rng) for _ in range(2))


def carried_out(old: ExpertPlacement, moves: LayerMoves) -> list[int]:
    """What the slots hold afterwards: all sources are read before the first slot is written."""
    arrived = [haul.expert if haul.source == CHECKPOINT else old.slot_experts[haul.source] for haul in moves.hauls]
    slots = list(old.slot_experts)
    for slot, haul in moves.writes:
        slots[slot] = arrived[haul]
    return slots


@settings(max_examples=80, deadline=None)
@given(change=changes())
def test_the_moves_lead_from_any_placement_to_any_other(change):
    old, new = change
    moves = diff(0, old, new)
    for got, wanted in zip(carried_out(old, moves), new.slot_experts, strict=True):
        assert wanted in (-1, got)
    assert len({(haul.expert, haul.rank) for haul in moves.hauls}) == len(moves.hauls), "one haul serves all slots"
    for rank in range(new.num_ranks):
        places = [haul.place for haul in moves.hauls if haul.rank == rank]
        assert sorted(places) == list(range(len(places)))
        assert len(places) <= new.slots_per_rank, "the pool holds them"
        for haul in moves.hauls:
            if haul.expert in old.experts_of(haul.rank):
                assert moves.sender(haul) == haul.rank, "nothing crosses the wire that is here already"


@settings(max_examples=80, deadline=None)
@given(change=changes())
def test_settling_in_keeps_every_expert_that_stays_on_its_rank_in_its_slot(change):
    old, new = change
    settled = settle_in(old, new)
    for rank in range(new.num_ranks):
        mine, had = settled.experts_of(rank), old.experts_of(rank)
        assert Counter(mine) == Counter(new.experts_of(rank))
        kept = sum((Counter(had) & Counter(mine)).values())
        assert sum(a == b for a, b in zip(had, mine, strict=True)) >= kept


def test_the_example_of_the_docstring():
    old = ExpertPlacement(num_ranks=2, slots_per_rank=2, slot_experts=(0, 1, 2, -1))
    new = ExpertPlacement(num_ranks=2, slots_per_rank=2, slot_experts=(1, 2, 0, 3))
    assert settle_in(old, new).slot_experts == (2, 1, 0, 3)


@settings(max_examples=80, deadline=None)
@given(change=changes(), blob_bytes=st.integers(1, 5000), rows=st.integers(1, 9))
def test_no_rank_sends_or_gets_more_than_the_limit_in_a_beat_and_every_byte_goes_once(change, blob_bytes, rows):
    old, new = change
    moves = diff(0, old, new)
    seen: dict[int, int] = {}
    for beat in cut(moves, blob_bytes=blob_bytes, limit=rows * CELL_BYTES):
        sent, got = Counter(), Counter()
        for piece in beat:
            assert piece.begin == seen.get(piece.haul, 0) < piece.end
            seen[piece.haul] = piece.end
            haul = moves.hauls[piece.haul]
            sent[moves.sender(haul)] += piece_cells(piece.end - piece.begin)
            got[haul.rank] += piece_cells(piece.end - piece.begin)
        assert max([*sent.values(), *got.values()]) <= rows
    assert seen == dict.fromkeys(range(len(moves.hauls)), blob_bytes)


def test_senders_share_the_work():
    """A hot expert on 4 of 8 ranks goes to the other 4: each holder sends it once."""
    old = ExpertPlacement(
        num_ranks=8, slots_per_rank=2, slot_experts=(0, 1, 0, 2, 0, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    )
    new = ExpertPlacement(
        num_ranks=8, slots_per_rank=2, slot_experts=(5, 1, 6, 2, 7, 3, 8, 4, 0, 12, 0, 9, 0, 10, 0, 11)
    )
    moves = diff(0, old, new)
    senders = [moves.sender(haul) for haul in moves.hauls if haul.expert == 0]
    assert sorted(senders) == [0, 1, 2, 3]


def test_a_copy_on_the_same_node_is_preferred():
    old = ExpertPlacement(num_ranks=4, slots_per_rank=2, slot_experts=(0, 1, 2, -1, 0, 3, 4, -1))
    new = ExpertPlacement(num_ranks=4, slots_per_rank=2, slot_experts=(0, 1, 2, 0, 0, 3, 4, 0))
    moves = diff(0, old, new, node_size=2)
    assert [(haul.rank, moves.sender(haul)) for haul in moves.hauls] == [(1, 0), (3, 2)]


@pytest.mark.parametrize(("checkpoint", "from_file"), [(0.0, 0), (1e9, 2), (100e9, 6), (1e6, 0)])
def test_a_checkpoint_is_asked_as_far_as_it_is_the_faster_way(checkpoint: float, from_file: int):
    """Rank 0 sends 6 experts one after the other; each of 3 ranks reads by itself."""
    old = ExpertPlacement(num_ranks=4, slots_per_rank=6, slot_experts=(*range(6), *[-1] * 18))
    new = ExpertPlacement(
        num_ranks=4, slots_per_rank=6, slot_experts=(*range(6), 0, 1, *[-1] * 4, 2, 3, *[-1] * 4, 4, 5, *[-1] * 4)
    )
    moves = diff(0, old, new, blob_bytes=1000, speeds=Speeds(ranks=3e9, checkpoint=checkpoint))
    assert sum(haul.source == CHECKPOINT for haul in moves.hauls) == from_file


@settings(max_examples=40, deadline=None)
@given(change=changes(), cells=st.integers(1, 9))
def test_what_a_rank_expects_of_a_beat_is_what_the_others_send_it_in_their_order(change, cells: int):
    old, new = change
    moves = diff(0, old, new, blob_bytes=700, speeds=Speeds(ranks=1e9, checkpoint=1e9 if cells > 3 else 0.0))
    ranks = range(new.num_ranks)
    for beat in cut(moves, blob_bytes=700, limit=cells * CELL_BYTES):
        portions = [portion(moves, beat, rank) for rank in ranks]
        assert sorted(piece for part in portions for piece in (*part.coming, *part.reads)) == sorted(beat)
        for rank, part in enumerate(portions):
            sent = [piece for peer in portions for piece in peer.going if moves.hauls[piece.haul].rank == rank]
            assert list(part.coming) == sent
            assert part.recv_splits == tuple(peer.send_splits[rank] for peer in portions)
            assert sum(part.recv_splits) == sum(piece_cells(piece.end - piece.begin) for piece in part.coming)
            assert all(moves.hauls[piece.haul].source == CHECKPOINT for piece in part.reads)
