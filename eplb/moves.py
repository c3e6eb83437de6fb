"""What a change of placement moves, and in which portions: plain index math, the same on every rank.

    placements   old (0, 1 | 2, 0)  new (0, 1 | 2, 1)
    haul         expert 1 from slot 1 to rank 1: one for each expert that a rank wants anew
    write        slot 3 gets that haul; two slots of a rank that get the same expert share one
    beats        hauls cut into pieces, so that no rank sends or receives more than a limit in one of them
    portion      what one rank sends and gets in a beat

Knows slots, ranks and bytes; does not know banks, transports or why a placement was chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe import ExpertPlacement

CELL_BYTES = 256
"""Bytes of a row on the wire: a piece travels in whole rows."""
CHECK_BYTES = 8
"""Behind each piece: the checksum of the haul's bytes up to its end."""
CHECKPOINT = -1
"""Instead of a slot: the expert is read from where the weights were loaded from."""


class Haul(NamedTuple):
    """An expert that comes to a rank. `place`: which of the rank's staging places it waits in."""

    expert: int
    source: int
    """Slot that has it, on any rank (this one too); or CHECKPOINT."""
    rank: int
    place: int


class Write(NamedTuple):
    """A slot that gets the expert of a haul."""

    slot: int
    haul: int


class Piece(NamedTuple):
    """Bytes [begin, end) of a haul."""

    haul: int
    begin: int
    end: int


Beat = tuple[Piece, ...]


class Portion(NamedTuple):
    """What one rank has to do with a beat. Pieces lie on the wire in this order, by peer; splits are in rows."""

    going: tuple[Piece, ...]
    coming: tuple[Piece, ...]
    reads: tuple[Piece, ...]
    """From the checkpoint; nobody sends them."""
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Bytes a second that a rank gets from other ranks, and from the checkpoint; 0 for the latter: it is not asked."""

    ranks: float = 50e9
    checkpoint: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMoves:
    """One MoE layer's way from a placement to the next. `layer` counts MoE layers from 0."""

    layer: int
    new: ExpertPlacement
    hauls: tuple[Haul, ...]
    writes: tuple[Write, ...]

    def rank_of(self, slot: int) -> int:
        return slot // self.new.slots_per_rank

    def sender(self, haul: Haul) -> int | None:
        """The rank that sends it; None where nobody does."""
        return None if haul.source == CHECKPOINT else self.rank_of(haul.source)


def settle_in(old: ExpertPlacement, new: ExpertPlacement) -> ExpertPlacement:
    """`new` with each rank's experts in another order: those that the rank has already stay where they are.

    old (0, 1 | 2, -1), new (1, 2 | 0, 3)  ->  (2, 1 | 0, 3)
    """
    slots: list[int] = []
    for rank in range(new.num_ranks):
        left = Counter(new.experts_of(rank))
        kept: list[int | None] = []
        for expert in old.experts_of(rank):
            stays = left[expert] > 0
            left[expert] -= stays
            kept.append(expert if stays else None)
        others = iter(sorted(left.elements(), key=lambda expert: (expert == -1, expert)))
        slots += [next(others) if expert is None else expert for expert in kept]
    return replace(new, slot_experts=tuple(slots))


def diff(
    layer: int,
    old: ExpertPlacement,
    new: ExpertPlacement,
    *,
    blob_bytes: int = 1,
    node_size: int | None = None,
    speeds: Speeds | None = None,
) -> LayerMoves:
    """The moves of one layer. A slot that becomes empty, or keeps its expert, is not written.

    A rank's own copy is the source of choice, then one on its node, then whoever sends least so far; or the checkpoint,
    where the last of all that is planned would be there sooner by it.
    """
    assert (old.num_ranks, old.slots_per_rank) == (new.num_ranks, new.slots_per_rank), (old, new)
    sources = _Sources(old, blob_bytes=blob_bytes, node_size=node_size or old.num_ranks, speeds=speeds or Speeds())
    known: dict[tuple[int, int], int] = {}
    hauls: list[Haul] = []
    writes: list[Write] = []
    places = [0] * new.num_ranks
    for slot, (had, gets) in enumerate(zip(old.slot_experts, new.slot_experts, strict=True)):
        if gets in (had, -1):
            continue
        rank = slot // new.slots_per_rank
        if (gets, rank) not in known:
            known[gets, rank] = len(hauls)
            hauls.append(Haul(gets, sources.choose(gets, rank), rank, places[rank]))
            places[rank] += 1
        writes.append(Write(slot, known[gets, rank]))
    return LayerMoves(layer=layer, new=new, hauls=tuple(hauls), writes=tuple(writes))


def cut(moves: LayerMoves, *, blob_bytes: int, limit: int) -> list[Beat]:
    """The hauls in pieces: in a beat no rank sends, or gets, more than `limit` bytes, checksums and filling included.

    What comes from a checkpoint is read whole, one expert a beat and rank, and counts as if it were sent.
    """
    cells = limit // CELL_BYTES
    assert cells > 0, f"limit {limit} holds no row of {CELL_BYTES} bytes"
    done = [0] * len(moves.hauls)
    beats: list[Beat] = []
    while min(done, default=blob_bytes) < blob_bytes:
        room_out, room_in = [[cells] * moves.new.num_ranks for _ in range(2)]
        beat: list[Piece] = []
        for index, haul in enumerate(moves.hauls):
            sender = moves.sender(haul)
            room = min(room_in[haul.rank], cells if sender is None else room_out[sender])
            size = _piece_bytes(blob_bytes - done[index], room, whole=sender is None)
            if size == 0:
                continue
            beat.append(Piece(index, done[index], done[index] + size))
            done[index] += size
            room_in[haul.rank] -= piece_cells(size)
            if sender is not None:
                room_out[sender] -= piece_cells(size)
        assert beat, f"{blob_bytes} bytes of a checkpoint do not fit into {limit}"
        beats.append(tuple(beat))
    return beats


def portion(moves: LayerMoves, beat: Beat, rank: int) -> Portion:
    """One rank's part of a beat; every rank finds its own, so that nobody has to tell how much comes."""
    senders = [moves.sender(moves.hauls[piece.haul]) for piece in beat]
    getters = [moves.hauls[piece.haul].rank for piece in beat]
    among = [(sender, getter, piece) for sender, getter, piece in zip(senders, getters, beat, strict=True)]
    size = moves.new.num_ranks
    going = [(getter, piece) for sender, getter, piece in among if sender == rank]
    coming = [(sender, piece) for sender, getter, piece in among if getter == rank and sender is not None]
    return Portion(
        going=tuple([piece for _, piece in sorted(going)]),
        coming=tuple([piece for _, piece in sorted(coming)]),
        reads=tuple([piece for sender, getter, piece in among if sender is None and getter == rank]),
        send_splits=_splits(going, size),
        recv_splits=_splits(coming, size),
    )


def _splits(pieces: Sequence[tuple[int, Piece]], size: int) -> tuple[int, ...]:
    splits = [0] * size
    for peer, piece in pieces:
        splits[peer] += piece_cells(piece.end - piece.begin)
    return tuple(splits)


def piece_cells(num_bytes: int) -> int:
    """Rows that a piece takes on the wire, with its checksum."""
    return -(-(num_bytes + CHECK_BYTES) // CELL_BYTES)


def _piece_bytes(left: int, room_cells: int, *, whole: bool) -> int:
    size = min(left, room_cells * CELL_BYTES - CHECK_BYTES)
    return 0 if size < left and whole else max(size, 0)


class _Sources:
    """Chooses sources for one layer, so that senders are loaded alike."""

    def __init__(self, old: ExpertPlacement, *, blob_bytes: int, node_size: int, speeds: Speeds) -> None:
        self._slots_per_rank = old.slots_per_rank
        self._holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(old.slot_experts):
            self._holders.setdefault(expert, []).append(slot)
        self._blob_bytes = blob_bytes
        self._node_size = node_size
        self._speeds = speeds
        self._sends, self._gets, self._reads = ([0] * old.num_ranks for _ in range(3))

    def choose(self, expert: int, rank: int) -> int:
        """The slot to take it from, or CHECKPOINT; booked as taken."""

        def cost(slot: int) -> tuple[bool, bool, int, int]:
            holder = slot // self._slots_per_rank
            far = holder // self._node_size != rank // self._node_size
            return holder != rank, far, self._sends[holder], (holder - rank) % len(self._sends)

        slot = min(self._holders[expert], key=cost)
        sender = slot // self._slots_per_rank
        by_rank_s = (max(self._sends[sender], self._gets[rank]) + self._blob_bytes) / self._speeds.ranks
        if sender != rank and self._speeds.checkpoint:
            by_file_s = (self._reads[rank] + self._blob_bytes) / self._speeds.checkpoint
            if by_file_s < by_rank_s:
                self._reads[rank] += self._blob_bytes
                return CHECKPOINT
        if sender != rank:
            self._sends[sender] += self._blob_bytes
            self._gets[rank] += self._blob_bytes
        return slot
