"""A hop over memory that all GPUs of a group can read: blocks as long as they have to be, lengths on the device.

    block    | header: tag, count | row | row |        one after the other; nobody asks how long another's is

One call tells every member where its block lies in the send buffer and fetches all blocks, in the order of their
sources. Places after the last block hold whatever lay there, and carry no slot. The host reads nothing.

    dispatch   the out buffer is read by others, the into buffer is filled
    combine    the other way round: who begins it has seen everybody end the dispatch before, so that no buffer is
               written while somebody still reads it, and the lengths of the two never share memory

Knows places and headers; the memory and the call are `symmetric`'s.

Legend: T rows to send, R members, P places to send, Q places that may land, K top-k, D model, B bytes of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .clock import TAG_WORDS
from .hops import HopPart, HopSpec, Landed, PairRows, rows_of
from .lanes import Lanes
from .layout import own_slots
from .places import DensePlaces, dense_places
from .rows import HEADER_WORDS, Rows
from .sums import Sums
from .terms import Terms
from .transport import Pending, Tag

MOST_BLOCKS = (64, 16)
"""Thread blocks that the call takes for a large buffer: inside the reach of loads, and beyond."""
FEWEST_BYTES = 4 << 20
"""A buffer of so many bytes is large: the call takes 64 blocks, one for each 64 KiB, and fewer for a smaller one."""


def row_align(num_members: int) -> int:
    """What a row's bytes have to be a multiple of: each of the blocks that fetch from a member takes an equal part.

    Read in torch's nvshmem_extension.cu (all_to_all_vdev asserts it on the device): 8 members -> lcm(16, 8, 2) = 16.
    """
    return math.lcm(16, *(max(blocks // num_members, 1) for blocks in MOST_BLOCKS))


def symmetric_bytes(spec: HopSpec) -> tuple[int, int]:
    """Bytes of `HopBuffers` (out, in)."""
    width = max(spec.row.num_bytes, spec.back.block_row_bytes)
    leave = spec.num_members + spec.most_rows * spec.copies
    land = spec.num_members * (1 + spec.most_rows)
    return max(leave * width, FEWEST_BYTES + width), max(land * width, FEWEST_BYTES + width)


def symmetric_landing(spec: HopSpec, bucket: int) -> int:
    """Places that experts look at in a round of so many tokens."""
    return spec.num_members * (1 + bucket)


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """What one call reads and writes beside the rows; memory of its own, that others write into."""

    leaving_R: Tensor
    """int64: rows to each member."""
    landed_2R: Tensor
    """int64: rows from each member, and where they begin."""


class Reach(Protocol):
    """What fetches blocks from everybody's buffers."""

    def lengths(self) -> Lengths:
        """For one hop and way."""
        ...

    def fetch(self, into_QB: Tensor, out_PB: Tensor, lengths: Lengths) -> None:
        """Whole buffers, as rows. Nothing is waited for."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SymmetricTrail:
    """What one rank sent in a hop, and got."""

    places: DensePlaces
    num_places: int
    lengths_R: Tensor
    """int64: places that came from each member, its header in it."""
    begin_R: Tensor
    """int64: where they begin, always inside the buffer."""


class SymmetricHop:
    """Rows to every member, fetched by who gets them."""

    def __init__(self, part: HopPart, *, reach: Reach, lanes: Lanes) -> None:
        self._group, self._spec, self._buffers, self._kinds, self._ops, self._faults, self._clock = part
        self._reach = reach
        self._lanes = lanes
        self._there, self._back = reach.lengths(), reach.lengths()

    def send(self, rows: Rows, *, tag: Tag, terms: Terms) -> Pending[Landed]:
        spec = self._spec
        num_places = spec.num_members + terms.bucket * spec.copies
        places = dense_places(
            rows.slots_NK,
            slots_per_member=spec.slots_per_member,
            num_members=spec.num_members,
            num_places=num_places,
        )
        words = self._clock.words(tag._replace(kind=self._kinds.dispatch))
        width = spec.row.num_bytes
        send_PB = rows_of(self._buffers.out, num_places, width)
        self._ops.pack(spec.row, rows, places.rows_P, send_PB)
        _write_heads(spec.row.header(send_PB), places.begin_R, words, places.lengths_R)
        self._there.leaving_R.copy_(places.lengths_R)

        def land(_: None) -> Landed:
            num_landing = symmetric_landing(spec, terms.bucket)
            landed_QB = rows_of(self._buffers.into, num_landing, width)
            lengths_R, begin_R = self._there.landed_2R.clone().unbind(0)
            all_QB = _whole(self._buffers.into, width)  # a rank out of step may have said any length, more than fits
            begin_R = begin_R.clamp(0, all_QB.shape[0] - 1)
            self._hear(spec.row.header(all_QB), begin_R, words)
            landed = spec.row.fields(landed_QB)
            own = own_slots(landed.slots_NK, member=self._group.rank, slots_per_member=spec.slots_per_member)
            is_landed_Q = torch.arange(num_landing, device=own.device) < lengths_R.sum()
            trail = SymmetricTrail(places, num_places, lengths_R, begin_R)
            return Landed(landed._replace(slots_NK=own.where(is_landed_Q.unsqueeze(1), -1)), trail)

        return self._fetch(self._buffers.into, self._buffers.out, width, self._there, tag).then(land)

    def back_rows(self, sums: Sums, trail: SymmetricTrail, *, tag: Tag) -> Pending[Sums]:
        """`sums` has a result for each place; those without a slot need none."""
        back = self._spec.back
        width = back.block_row_bytes
        send_QB = rows_of(self._buffers.into, sums.index_NJ.shape[0], width)
        self._ops.add_to_places(sums, back.values(send_QB))
        words = self._clock.words(tag._replace(kind=self._kinds.combine))
        _write_heads(_header(_whole(self._buffers.into, width)), trail.begin_R, words, trail.lengths_R)
        self._back.leaving_R.copy_(trail.lengths_R)

        def find(_: None) -> Sums:
            back_PB = rows_of(self._buffers.out, trail.num_places, width)
            self._hear(_header(back_PB), trail.places.begin_R, words)
            return Sums(back.values(back_PB), trail.places.back_TJ)

        return self._fetch(self._buffers.out, self._buffers.into, width, self._back, tag).then(find)

    def back_pairs(self, pairs: PairRows, trail: SymmetricTrail, *, tag: Tag) -> Pending[PairRows]:  # noqa: ARG002  # the protocol's
        """A buffer for every pair that may land would be top-k times as large, so there is no such way."""
        raise AssertionError(f"{tag}: symmetric memory brings one row back for each that landed")

    def _fetch(self, into: Tensor, out: Tensor, width: int, lengths: Lengths, tag: Tag) -> Pending[None]:
        def work() -> Pending[None]:
            self._reach.fetch(_whole(into, width), _whole(out, width), lengths)
            return Pending.ready(None)

        return self._lanes.start(work, tag=tag)

    def _hear(self, header_PW: Tensor, begin_R: Tensor, words: Tensor) -> None:
        """Compare the headers' tags with ours."""
        self._faults.compare(header_PW[begin_R, :TAG_WORDS], words)


def _whole(buffer: Tensor, width: int) -> Tensor:
    """All rows that it has room for."""
    return rows_of(buffer, buffer.shape[0] // width, width)


def _write_heads(header_PW: Tensor, begin_R: Tensor, words: Tensor, lengths_R: Tensor) -> None:
    header_PW[begin_R] = torch.cat((words.expand(len(begin_R), -1), lengths_R.unsqueeze(1)), dim=1)


def _header(rows_PB: Tensor) -> Tensor:
    """[P, HEADER_WORDS]: where the header of a block on its way back lies, in every row."""
    return rows_PB[:, : 8 * HEADER_WORDS].view(torch.int64)
