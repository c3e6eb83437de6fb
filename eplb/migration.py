"""Experts on their way from slot to slot while decoding goes on: one layer after the other, a few bytes a step.

    beat, beat, .. beat      pieces of blobs cross the wire, each with a checksum, and wait in the pool
    all ranks have all       agreed in the vote; until then the old placement is whole, and the rest can be thrown away
    write                    slots and the layer's map are overwritten in place

The pool is one piece of memory for all layers; it is as large as what one rank can get in one layer. Knows banks, moves
and the transport; does not know loads, votes or when to begin (see `rebalancer`).

Legend: B bytes of a blob, S staging places, N rows on the wire, C bytes of such a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ep import CheckpointError, Kind, Tag, Transport
from moe import ExpertBank, ExpertPlacement

from .moves import CELL_BYTES, CHECK_BYTES, LayerMoves, Piece, cut, piece_cells

Fetch = Callable[[int, int, Tensor], None]
"""fetch(MoE layer, expert, out): fill uint8 [B] with the expert's blob as the checkpoint has it."""


class Fault(IntEnum):
    """Why a rank cannot go on with a migration; what it votes then."""

    CHECKSUM = -1
    CHECKPOINT = -2

    def __str__(self) -> str:
        return {
            Fault.CHECKSUM: "got wrong bytes (checksum)",
            Fault.CHECKPOINT: "could not read the checkpoint, which is asked no more",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One MoE layer on one rank, as far as a migration touches it."""

    bank: ExpertBank
    show: Callable[[ExpertPlacement], None]
    """Point the layer's map at a placement, in place."""


class Pool:
    """Memory that all layers share: where arrivals wait, and what a beat sends and gets. Allocated once."""

    def __init__(self, *, places: int, blob_bytes: int, limit: int, device: torch.device | str = "cpu") -> None:
        self.limit = limit
        self.staging_SB = torch.zeros(places, blob_bytes, dtype=torch.uint8, device=device)
        self.send_NC = torch.zeros(limit // CELL_BYTES, CELL_BYTES, dtype=torch.uint8, device=device)
        self.recv_NC = torch.zeros_like(self.send_NC)

    @property
    def num_bytes(self) -> int:
        return self.staging_SB.nbytes + self.send_NC.nbytes + self.recv_NC.nbytes


def pool_bytes(*, places: int, blob_bytes: int, limit: int) -> int:
    """Bytes that a Pool allocates."""
    return places * blob_bytes + 2 * (limit // CELL_BYTES * CELL_BYTES)


class LayerTransfer:
    """One layer's hauls as one rank takes part in them. All ranks make the same beats, also those that only watch."""

    def __init__(
        self, moves: LayerMoves, *, layer: ExpertLayer, pool: Pool, transport: Transport, fetch: Fetch | None = None
    ) -> None:
        self.moves = moves
        self.fault: Fault | None = None
        self.why = ""
        self.most_bytes = 0
        self._layer = layer
        self._pool = pool
        self._transport = transport
        self._fetch = fetch
        self._beats = cut(moves, blob_bytes=layer.bank.blob_bytes, limit=pool.limit)
        self._num_done = 0
        self._sent_crc = [0] * len(moves.hauls)
        self._got_crc = [0] * len(moves.hauls)

    @property
    def complete(self) -> bool:
        """No beat is left; what has come is here and right unless there is a fault."""
        return self._num_done == len(self._beats)

    def beat(self, *, step: int) -> None:
        """Make the next beat, on all ranks at the same place of their program."""
        pieces = self._beats[self._num_done]
        self._num_done += 1
        rank, size, moves = self._transport.rank, self._transport.size, self.moves
        senders = [moves.sender(haul) for haul in moves.hauls]
        going = [piece for peer in range(size) for piece in pieces if self._crosses(piece, rank, peer, senders)]
        coming = [piece for peer in range(size) for piece in pieces if self._crosses(piece, peer, rank, senders)]
        send_splits = self._splits(going, [moves.hauls[piece.haul].rank for piece in going])
        recv_splits = self._splits(coming, [senders[piece.haul] for piece in coming])
        self.most_bytes = max(self.most_bytes, CELL_BYTES * max(sum(send_splits), sum(recv_splits)))
        self._pack(going)
        rows = self._transport.all_to_all(
            self._pool.recv_NC[: sum(recv_splits)],
            self._pool.send_NC[: sum(send_splits)],
            recv_splits=recv_splits,
            send_splits=send_splits,
            tag=Tag(step, moves.layer, 0, self._num_done, Kind.MIGRATE),
        )
        self._read(piece for piece in pieces if senders[piece.haul] is None)
        rows.wait()
        self._unpack(coming)

    def write(self) -> None:
        """The switch: this rank's slots of the layer, then its map. Every rank does it in the same step."""
        assert self.complete, f"layer {self.moves.layer} is written after {self._num_done} of {len(self._beats)} beats"
        assert self.fault is None, self.fault
        slots_per_rank = self.moves.new.slots_per_rank
        for slot, index in self.moves.writes:
            haul = self.moves.hauls[index]
            if haul.rank == self._transport.rank:
                self._layer.bank.write_blob(slot % slots_per_rank, self._staged(haul.place))
        self._layer.show(self.moves.new)

    def _crosses(self, piece: Piece, sender: int, rank: int, senders: Sequence[int | None]) -> bool:
        return senders[piece.haul] == sender and self.moves.hauls[piece.haul].rank == rank

    def _splits(self, pieces: Sequence[Piece], peers: Sequence[int | None]) -> list[int]:
        splits = [0] * self._transport.size
        for piece, peer in zip(pieces, peers, strict=True):
            assert peer is not None, piece
            splits[peer] += piece_cells(piece.end - piece.begin)
        return splits

    def _pack(self, pieces: Iterable[Piece]) -> None:
        for piece, flat in _on_the_wire(self._pool.send_NC, pieces):
            values, check = flat
            slot = self.moves.hauls[piece.haul].source % self.moves.new.slots_per_rank
            self._layer.bank.copy_bytes(slot, piece.begin, values)
            self._sent_crc[piece.haul] = crc = checksum(values, self._sent_crc[piece.haul])
            check.copy_(torch.tensor(list(crc.to_bytes(CHECK_BYTES, "little")), dtype=torch.uint8))

    def _unpack(self, pieces: Iterable[Piece]) -> None:
        """What is compared is what lies in the pool, not what came."""
        for piece, (values, check) in _on_the_wire(self._pool.recv_NC, pieces):
            staged = self._staged(self.moves.hauls[piece.haul].place)[piece.begin : piece.end]
            staged.copy_(values)
            self._got_crc[piece.haul] = crc = checksum(staged, self._got_crc[piece.haul])
            if crc.to_bytes(CHECK_BYTES, "little") != bytes(check.tolist()):
                haul = self.moves.hauls[piece.haul]
                self._fail(Fault.CHECKSUM, f"expert {haul.expert} of slot {haul.source}")

    def _read(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            haul = self.moves.hauls[piece.haul]
            if haul.rank == self._transport.rank:
                assert self._fetch is not None, f"{haul} without a checkpoint"
                try:
                    self._fetch(self.moves.layer, haul.expert, self._staged(haul.place))
                except (CheckpointError, OSError) as error:  # told in the vote: everybody drops the migration
                    self._fail(Fault.CHECKPOINT, str(error))

    def _staged(self, place: int) -> Tensor:
        return self._pool.staging_SB[place, : self._layer.bank.blob_bytes]

    def _fail(self, fault: Fault, why: str) -> None:
        if self.fault is None:
            self.fault, self.why = fault, why


def checksum(bytes_B: Tensor, start: int = 0) -> int:
    """CRC-32 of uint8 values, going on from that of the bytes before them."""
    return zlib.crc32(bytes_B.cpu().numpy().data, start)


def _on_the_wire(rows_NC: Tensor, pieces: Iterable[Piece]) -> Iterable[tuple[Piece, tuple[Tensor, Tensor]]]:
    """Each piece with its part of a buffer: (its bytes, its checksum), as views."""
    row = 0
    for piece in pieces:
        size, cells = piece.end - piece.begin, piece_cells(piece.end - piece.begin)
        flat = rows_NC[row : row + cells].view(-1)
        yield piece, (flat[:size], flat[size : size + CHECK_BYTES])
        row += cells
