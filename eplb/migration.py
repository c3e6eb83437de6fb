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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

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


class _Laid(NamedTuple):
    """A piece in a buffer of bytes: `values` where it lies, then its checksum up to `end`."""

    haul: int
    copies: list[tuple[Tensor, Tensor]]
    """To, from."""
    values: slice
    end: int

    def copy(self) -> None:
        for out, values in self.copies:
            out.copy_(values)


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
        self._going = [self._lay_out(part.going, pool.send_NC, self._sent) for part in self._portions]
        self._coming = [self._lay_out(part.coming, pool.recv_NC, self._kept) for part in self._portions]
        self._num_done = 0
        self._crc: dict[tuple[bool, int], int] = {}

    @property
    def complete(self) -> bool:
        """No beat is left; what has come is here and right unless there is a fault."""
        return self._num_done == len(self._portions)

    def beat(self, *, step: int) -> None:
        """Make the next beat, on all ranks at the same place of their program."""
        number = self._num_done
        part = self._portions[number]
        self._num_done += 1
        send_NC, recv_NC = self._pool.send_NC[: sum(part.send_splits)], self._pool.recv_NC[: sum(part.recv_splits)]
        self.most_bytes = max(self.most_bytes, send_NC.nbytes, recv_NC.nbytes)
        self._pack(self._going[number], send_NC)
        rows = self._transport.all_to_all(
            recv_NC,
            send_NC,
            recv_splits=part.recv_splits,
            send_splits=part.send_splits,
            tag=Tag(step, self.moves.layer, 0, self._num_done, Kind.MIGRATE),
        )
        self._read(part.reads)
        rows.wait()
        self._unpack(self._coming[number], recv_NC)

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

    def _lay_out(
        self, pieces: Sequence[Piece], buffer_NC: Tensor, copies: Callable[[Piece, Tensor], list[tuple[Tensor, Tensor]]]
    ) -> list[_Laid]:
        """Where each piece lies in a buffer: found before the first beat, so that a beat only copies and checks."""
        flat, laid, begin = buffer_NC.view(-1), [], 0
        for piece in pieces:
            end = begin + piece.end - piece.begin
            laid.append(_Laid(piece.haul, copies(piece, flat[begin:end]), slice(begin, end), end + CHECK_BYTES))
            begin += piece_cells(end - begin) * CELL_BYTES
        return laid

    def _sent(self, piece: Piece, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        slot = self.moves.hauls[piece.haul].source % self.moves.new.slots_per_rank
        return self._layer.bank.parts(slot, piece.begin, values)

    def _kept(self, piece: Piece, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self._pool.staging_SB[self.moves.hauls[piece.haul].place, piece.begin : piece.end], values)]

    def _pack(self, pieces: Sequence[_Laid], rows_NC: Tensor) -> None:
        """All bytes first: a checksum is the host's work, which a device's memory then visits once."""
        for piece in pieces:
            piece.copy()
        host_NC = rows_NC.cpu()  # the same memory where it is the host's
        view = host_NC.view(-1).numpy().data
        for piece in pieces:
            view[piece.values.stop : piece.end] = self._check(piece, view[piece.values], sent=True)
        rows_NC.copy_(host_NC)

    def _unpack(self, pieces: Sequence[_Laid], rows_NC: Tensor) -> None:
        """What is compared is what lies in the pool, not what came."""
        view = rows_NC.cpu().view(-1).numpy().data
        for piece in pieces:
            piece.copy()
            [(staged, _)] = piece.copies
            if view[piece.values.stop : piece.end] != self._check(piece, staged.cpu().numpy().data, sent=False):
                haul = self.moves.hauls[piece.haul]
                self._fail(Fault.CHECKSUM, f"expert {haul.expert} of slot {haul.source}")

    def _check(self, piece: _Laid, values: memoryview, *, sent: bool) -> bytes:
        """The checksum (CRC-32) of the haul up to the piece's end, as it stands behind the piece."""
        crc = self._crc[sent, piece.haul] = zlib.crc32(values, self._crc.get((sent, piece.haul), 0))
        return crc.to_bytes(CHECK_BYTES, "little")

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
