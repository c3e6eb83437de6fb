"""A hop with blocks of a fixed size: every member gets as many bytes as every other, however many rows there are.

    block    | header: tag, count | row | row | nothing .. |        equal on all ranks, so nobody asks how many come

Nothing here is read by the host or copied from it, so that an exchange can be recorded and replayed (see `clock`):
counts, tags and whether everything fitted stay on the device until somebody looks at the flags. A row that does not fit
is left behind and says so. Places without a row carry no slot, cost the experts nothing, and what comes back in them is
never read.

Legend: T rows to send, D model, K top-k, R members, N = P places of all blocks, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .clock import TAG_WORDS
from .hops import HopPart, HopSpec, Landed, PairRows, rows_of
from .layout import own_slots
from .places import RowPlaces, come_back, given_back
from .rows import HEADER_WORDS, Rows
from .sums import Sums
from .terms import Terms
from .transport import Pending, Tag

assert HEADER_WORDS == TAG_WORDS + 1, "a header is a tag and a count"


class Capacities(Protocol):
    """Rows that a block of one hop has places for, by the bucket and the level of the terms."""

    def dispatch(self, bucket: int, level: int) -> int: ...

    def combine(self, bucket: int, level: int) -> int: ...


class Overflow:
    """One rank's flag: something was left behind."""

    def __init__(self, device: torch.device | str) -> None:
        self.flag = torch.zeros((), dtype=torch.bool, device=device)

    def take(self) -> Tensor:
        """A bool scalar of its own; the flag is down again."""
        taken = self.flag.clone()
        self.flag.zero_()
        return taken


@dataclass(frozen=True, slots=True, eq=False)
class BoundedTrail:
    """What one rank sent in a hop, and got."""

    places: RowPlaces
    slots_TK: Tensor
    counts_R: Tensor
    """int64, on the device: rows that came from each member."""
    terms: Terms


class BoundedHop:
    """Blocks of equal size to and from every member."""

    def __init__(self, part: HopPart, *, capacities: Capacities, overflow: Overflow) -> None:
        self._group, self._spec, self._buffers, self._kinds, self._ops, self._faults, self._clock = part
        self._capacities = capacities
        self._overflow = overflow

    def send(self, rows: Rows, *, tag: Tag, terms: Terms) -> Pending[Landed]:
        spec, capacity = self._spec, self._capacities.dispatch(terms.bucket, terms.level)
        places = self._ops.find_places(
            rows.slots_NK,
            slots_per_member=spec.slots_per_member,
            num_members=spec.num_members,
            capacity=capacity,
        )
        self._overflow.flag.logical_or_(places.overflow)
        send_PB = rows_of(self._buffers.out, places.rows_P.shape[0], spec.row.num_bytes)
        self._ops.pack(spec.row, rows, places.rows_P, send_PB)
        tag = tag._replace(kind=self._kinds.dispatch)
        words = self._clock.words(tag)
        blocks = self._exchange(self._buffers.into, send_PB, spec.row.header(send_PB), words, places.counts_R, tag)

        def land(landed_PB: Tensor) -> Landed:
            counts_R = self._hear(spec.row.header(landed_PB), words)
            landed = spec.row.fields(landed_PB)
            own = own_slots(landed.slots_NK, member=self._group.rank, slots_per_member=spec.slots_per_member)
            trail = BoundedTrail(places, rows.slots_NK, counts_R, terms)
            return Landed(landed._replace(slots_NK=own), trail)

        return blocks.then(land)

    def back_rows(self, sums: Sums, trail: BoundedTrail, *, tag: Tag) -> Pending[Sums]:
        """`sums` has a result for each place; those without a slot need none."""
        back = self._spec.back
        send_PB = rows_of(self._buffers.into, sums.index_NJ.shape[0], back.block_row_bytes)
        self._ops.add_to_places(sums, back.values(send_PB))
        tag = tag._replace(kind=self._kinds.combine)
        words = self._clock.words(tag)
        blocks = self._exchange(self._buffers.out, send_PB, _header(send_PB), words, trail.counts_R, tag)

        def find(back_PB: Tensor) -> Sums:
            self._hear(_header(back_PB), words)
            return Sums(back.values(back_PB), trail.places.back_TJ)

        return blocks.then(find)

    def back_pairs(self, pairs: PairRows, trail: BoundedTrail, *, tag: Tag) -> Pending[PairRows]:
        spec, back = self._spec, self._spec.back
        capacity = self._capacities.combine(trail.terms.bucket, trail.terms.level)
        index_P, overflow = given_back(pairs.index_NK, num_members=spec.num_members, capacity=capacity)
        self._overflow.flag.logical_or_(overflow)
        send_PB = rows_of(self._buffers.into, index_P.shape[0], back.block_row_bytes)
        if pairs.rows_MD.shape[0]:
            torch.index_select(pairs.rows_MD.to(back.dtype), 0, index_P, out=back.values(send_PB))
        tag = tag._replace(kind=self._kinds.combine)
        words = self._clock.words(tag)
        blocks = self._exchange(self._buffers.out, send_PB, _header(send_PB), words, trail.counts_R, tag)
        index_TK = come_back(
            trail.slots_TK, trail.places.fits_TR, slots_per_member=spec.slots_per_member, capacity=capacity
        )

        def find(back_PB: Tensor) -> PairRows:
            self._hear(_header(back_PB), words)
            return PairRows(back.values(back_PB), index_TK)

        return blocks.then(find)

    def _exchange(
        self, buffer: Tensor, send_PB: Tensor, header_PW: Tensor, words: Tensor, counts_R: Tensor, tag: Tag
    ) -> Pending[Tensor]:
        """Write the headers, then blocks to everybody."""
        num_places, row_bytes = send_PB.shape
        splits = (num_places // self._group.size,) * self._group.size
        heads_RW = header_PW[:: splits[0]]
        heads_RW[:, :TAG_WORDS] = words
        heads_RW[:, TAG_WORDS] = counts_R
        recv_PB = rows_of(buffer, num_places, row_bytes)
        return self._group.all_to_all(recv_PB, send_PB, recv_splits=splits, send_splits=splits, tag=tag)

    def _hear(self, header_PW: Tensor, words: Tensor) -> Tensor:
        """Compare the headers' tags with ours; the counts, [members]."""
        heads_RW = header_PW[:: header_PW.shape[0] // self._group.size]
        self._faults.compare(heads_RW[:, :TAG_WORDS], words)
        return heads_RW[:, TAG_WORDS].clone()


def bounded_bytes(spec: HopSpec, *, dispatch: int, combine: int) -> tuple[int, int]:
    """Bytes of `HopBuffers` that blocks of these capacities take: both ways have blocks of the same size."""
    there = spec.num_members * (1 + dispatch) * spec.row.num_bytes
    back = spec.num_members * (1 + combine) * spec.back.block_row_bytes
    return max(there, back), max(there, back)


def _header(rows_PB: Tensor) -> Tensor:
    """[P, HEADER_WORDS]: where the header of a block on its way back lies, in every row."""
    return rows_PB[:, : 8 * HEADER_WORDS].view(torch.int64)
