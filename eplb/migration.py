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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ep import CheckpointError, Kind, Tag, Transport
from moe import ExpertBank, ExpertPlacement

from .moves import CELL_BYTES, CHECK_BYTES, LayerMoves, Piece, cut, piece_cells, portion

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
        rank, self._blob_bytes = transport.rank, layer.bank.blob_bytes
        beats = cut(moves, blob_bytes=self._blob_bytes, limit=pool.limit)
        self._portions = [portion(moves, beat, rank) for beat in beats]
        self._num_done = 0
        self._crc: dict[tuple[bool, int], int] = {}

    @property
    def complete(self) -> bool:
        """No beat is left; what has come is here and right unless there is a fault."""
        return self._num_done == len(self._portions)

    def beat(self, *, step: int) -> None:
        """Make the next beat, on all ranks at the same place of their program."""
        part = self._portions[self._num_done]
        self._num_done += 1
        send_NC, recv_NC = self._pool.send_NC[: sum(part.send_splits)], self._pool.recv_NC[: sum(part.recv_splits)]
        self.most_bytes = max(self.most_bytes, send_NC.nbytes, recv_NC.nbytes)
        self._pack(part.going, send_NC)
        rows = self._transport.all_to_all(
            recv_NC,
            send_NC,
            recv_splits=part.recv_splits,
            send_splits=part.send_splits,
            tag=Tag(step, self.moves.layer, 0, self._num_done, Kind.MIGRATE),
        )
        self._read(part.reads)
        rows.wait()
        self._unpack(part.coming, recv_NC)

    def write(self) -> None:
        """The switch: this rank's slots of the layer, then its map. Every rank does it in the same step."""
        assert self.complete, (
            f"layer {self.moves.layer} is written after {self._num_done} of {len(self._portions)} beats"
        )
        assert self.fault is None, self.fault
        slots_per_rank = self.moves.new.slots_per_rank
        for slot, index in self.moves.writes:
            haul = self.moves.hauls[index]
            if haul.rank == self._transport.rank:
                self._layer.bank.write_blob(slot % slots_per_rank, self._staged(haul.place))
        self._layer.show(self.moves.new)

    def _pack(self, pieces: Sequence[Piece], rows_NC: Tensor) -> None:
        for piece, values, check in _on_the_wire(rows_NC, pieces):
            slot = self.moves.hauls[piece.haul].source % self.moves.new.slots_per_rank
            self._layer.bank.copy_bytes(slot, piece.begin, values)
            check.copy_(torch.frombuffer(self._check(piece, values, sent=True), dtype=torch.uint8))

    def _unpack(self, pieces: Sequence[Piece], rows_NC: Tensor) -> None:
        """What is compared is what lies in the pool, not what came."""
        for piece, values, check in _on_the_wire(rows_NC, pieces):
            haul = self.moves.hauls[piece.haul]
            staged = self._pool.staging_SB[haul.place, piece.begin : piece.end].copy_(values)
            if self._check(piece, staged, sent=False) != bytes(check.tolist()):
                self._fail(Fault.CHECKSUM, f"expert {haul.expert} of slot {haul.source}")

    def _check(self, piece: Piece, values: Tensor, *, sent: bool) -> bytearray:
        """The checksum of the haul up to the piece's end, as it stands behind the piece."""
        crc = checksum(values, self._crc.get((sent, piece.haul), 0))
        self._crc[sent, piece.haul] = crc
        return bytearray(crc.to_bytes(CHECK_BYTES, "little"))

    def _read(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            haul = self.moves.hauls[piece.haul]
            assert self._fetch is not None, f"{haul} without a checkpoint"
            try:
                self._fetch(self.moves.layer, haul.expert, self._staged(haul.place))
            except (CheckpointError, OSError) as error:  # told in the vote: everybody drops the migration
                self._fail(Fault.CHECKPOINT, str(error))

    def _staged(self, place: int) -> Tensor:
        return self._pool.staging_SB[place, : self._blob_bytes]

    def _fail(self, fault: Fault, why: str) -> None:
        if self.fault is None:
            self.fault, self.why = fault, why


def checksum(bytes_B: Tensor, start: int = 0) -> int:
    """CRC-32 of uint8 values, going on from that of the bytes before them."""
    return zlib.crc32(bytes_B.cpu().numpy().data, start)


def _on_the_wire(rows_NC: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Each piece with its part of a buffer: its bytes and its checksum, as views."""
    flat = rows_NC.view(-1)
    begin = 0
    for piece in pieces:
        size = piece.end - piece.begin
        yield piece, flat[begin : begin + size], flat[begin + size : begin + size + CHECK_BYTES]
        begin += piece_cells(size) * CELL_BYTES
