"""A hop over NVIDIA's NCCL expert-parallel library, rank-major and in its low-latency mode.

    dispatch   [members, rows + header] out of it: a row lands once on each member that has a slot of it, in any order
               among the rows of its source; what was not written keeps what lay there
    combine    the rows that landed go home; the library adds them in float32, in the order of the row's slots

A rank sends one row more to each member, a header that carries its tag: whoever is at another place of the program is
found on the device, as in `bounded`. On its way back the header lies in values, a byte in each, which every number
format keeps. Nothing is read by the host, and a row that is not sent costs nothing on the wire.

    send buffer    tokens | trailers: tag, is header | slots | weights      rows 0 .. members - 1 are the headers
    land buffer    tokens | trailers                 | slots | weights | counts

Knows the shapes of the library's tensors; what it is and how it is opened is `nccl_ep`.

Legend: T rows to send, M rows that a rank sends at most, R members, N = R * M rows that may land, K top-k, D model,
B bytes of a row's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .clock import TAG_WORDS
from .hops import HopPart, HopSpec, Landed, PairRows
from .lanes import Lanes
from .rows import FP8, Rows, up_to
from .sums import Sums
from .terms import Terms
from .transport import Pending, Tag

TRAILER_WORDS = TAG_WORDS + 1
"""int64 words that travel beside a row's values: the tag's five, and 1 in a header."""
TAG_BYTES = 8 * TAG_WORDS
IDX_BYTES = {"out": 8, "into": 4}
"""The library takes int64 slots and gives int32 ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One side of a way there, what leaves or where it lands; contiguous."""

    tokens: Tensor
    """[rows, columns], rows of a multiple of 16 bytes."""
    trailers: Tensor
    """uint8 [rows, 8 * TRAILER_WORDS]."""
    slots: Tensor
    """[rows, K]: int64 of the group when they leave, int32 of the member when they land; -1 none."""
    weights: Tensor
    """float32 [rows, K]."""

    def first(self, num_rows: int) -> Part:
        """The same memory, fewer rows."""
        return Part(*(each[:num_rows] for each in (self.tokens, self.trailers, self.slots, self.weights)))

    def by_member(self, num_members: int) -> Part:
        """The same memory, [members, rows of each, ..]."""
        split = (
            each.unflatten(0, (num_members, -1)) for each in (self.tokens, self.trailers, self.slots, self.weights)
        )
        return Part(*split)


class Library(Protocol):
    """One handle of the library: a dispatch, then its combine."""

    def dispatch(self, send: Part, land: Part, counts_R: Tensor) -> None:
        """`land` is [members, M, ..]; int32 counts: rows that came from each. Nothing is waited for."""
        ...

    def combine(self, give_RMD: Tensor, back_TD: Tensor) -> None:
        """`give` has a row for each that landed, `back` one for each that was sent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the hop asks of the library, and of its buffers."""

    spec: HopSpec

    @property
    def rows(self) -> int:
        """M: rows that a rank sends at most, headers in it."""
        return self.spec.most_rows + self.spec.num_members

    @property
    def token_bytes(self) -> int:
        return up_to(16, self.spec.row.value_bytes)

    @property
    def most_bytes(self) -> int:
        """Of a row on any of its ways, trailer in it."""
        return max(self.token_bytes + 8 * TRAILER_WORDS, self.spec.back.value_bytes)

    def regions(self, num_rows: int, idx_bytes: int) -> Sequence[int]:
        """Bytes of tokens (or of what comes back), trailers, slots and weights, each begun at a multiple of 16."""
        widths = max(self.token_bytes, self.spec.back.value_bytes), 8 * TRAILER_WORDS, idx_bytes * self.spec.row.top_k
        return [up_to(16, num_rows * width) for width in (*widths, 4 * self.spec.row.top_k)]

    def carve(self, buffer: Tensor, num_rows: int, dtype: torch.dtype, idx_dtype: torch.dtype) -> Part:
        """The parts of a buffer."""
        regions = torch.split(buffer[: sum(sizes := self.regions(num_rows, idx_dtype.itemsize))], list(sizes))
        top_k = self.spec.row.top_k
        shapes = (
            (self.token_bytes, dtype),
            (8 * TRAILER_WORDS, torch.uint8),
            (idx_dtype.itemsize * top_k, idx_dtype),
            (4 * top_k, torch.float32),
        )
        return Part(
            *(
                region[: num_rows * width].view(num_rows, width).view(each)
                for region, (width, each) in zip(regions, shapes, strict=True)
            )
        )


def nccl_ep_bytes(spec: HopSpec) -> tuple[int, int]:
    """Bytes of `HopBuffers` (out, in): two tensors of each kind, and the counts."""
    sizes = Sizes(spec=spec)
    landing = sum(sizes.regions(spec.num_members * sizes.rows, IDX_BYTES["into"]))
    return sum(sizes.regions(sizes.rows, IDX_BYTES["out"])), landing + up_to(16, 4 * spec.num_members)


def nccl_ep_landing(spec: HopSpec, bucket: int) -> int:  # noqa: ARG001  # the library's places are always all there
    """Places that experts look at in a round of so many tokens."""
    return spec.num_members * Sizes(spec=spec).rows


def token_dtype(spec: HopSpec, dtype: torch.dtype) -> torch.dtype:
    """What the library is told that tokens are made of: the run's numbers as they are, or bytes in fp8's name."""
    as_they_are = spec.row.value_bytes == spec.back.hidden * dtype.itemsize
    return dtype if as_they_are else FP8


@dataclass(frozen=True, slots=True, eq=False)
class NcclEpTrail:
    """What one rank sent in a hop, and got."""

    num_rows: int
    num_sent: int
    """Rows that the library was given, headers and places without a row in it."""
    heads_R: Tensor
    """int64: where each member's header landed."""


class NcclEpHop:
    """Rows to every member by the library, which counts on the device."""

    def __init__(self, part: HopPart, *, library: Library, lanes: Lanes, dtype: torch.dtype) -> None:
        group, self._spec, self._buffers, self._kinds, self._ops, self._faults, self._clock = part
        self._library = library
        self._lanes = lanes
        spec, buffers = part.spec, part.buffers
        sizes, size = Sizes(spec=spec), group.size
        self._rows = sizes.rows
        dtype = token_dtype(spec, dtype)
        self._send = sizes.carve(buffers.out, self._rows, dtype, torch.int64)
        self._land = sizes.carve(buffers.into, size * self._rows, dtype, torch.int32)
        ends = sum(sizes.regions(size * self._rows, IDX_BYTES["into"]))
        self._counts_R = buffers.into[ends : ends + 4 * size].view(torch.int32)
        device = buffers.out.device
        self._first_slots_R = torch.arange(size, device=device) * spec.slots_per_member
        self._origin_N = torch.arange(size, device=device).repeat_interleave(self._rows)
        self._begin_R = torch.arange(size, device=device) * self._rows
        self._place_M = torch.arange(self._rows, device=device)
        self._shifts_8 = torch.arange(0, 64, 8, device=device)

    def send(self, rows: Rows, *, tag: Tag, terms: Terms) -> Pending[Landed]:
        size, num_rows = self._spec.num_members, rows.slots_NK.shape[0]
        num_sent = size + terms.bucket
        words = self._clock.words(tag._replace(kind=self._kinds.dispatch))
        self._fill(rows, words, num_sent)

        def work() -> Pending[None]:
            self._library.dispatch(self._send.first(num_sent), self._land.by_member(size), self._counts_R)
            return Pending.ready(None)

        return self._lanes.start(work, tag=tag).then(lambda _: self._landed(words, num_rows, num_sent))

    def back_rows(self, sums: Sums, trail: NcclEpTrail, *, tag: Tag) -> Pending[Sums]:
        """`sums` has a result for each place; those without a slot need none."""
        back, size = self._spec.back, self._spec.num_members
        give_ND = self._values(self._buffers.into, size * self._rows)
        self._ops.add_to_places(sums, give_ND)
        words = self._clock.words(tag._replace(kind=self._kinds.combine))
        give_ND[trail.heads_R, :TAG_BYTES] = words.view(torch.uint8).to(back.dtype)
        back_TD = self._values(self._buffers.out, trail.num_sent)

        def work() -> Pending[None]:
            self._library.combine(give_ND.unflatten(0, (size, -1)), back_TD)
            return Pending.ready(None)

        def find(_: None) -> Sums:
            bytes_R58 = back_TD[:size, :TAG_BYTES].to(torch.int64).unflatten(1, (TAG_WORDS, 8))
            self._faults.compare((bytes_R58 << self._shifts_8).sum(2), words)
            mine_T = torch.arange(trail.num_rows, device=back_TD.device)
            return Sums(back_TD[size : size + trail.num_rows], mine_T.unsqueeze(1))

        return self._lanes.start(work, tag=tag).then(find)

    def back_pairs(self, pairs: PairRows, trail: NcclEpTrail, *, tag: Tag) -> Pending[PairRows]:  # noqa: ARG002  # the protocol's
        """The library brings one row back for each that landed, so there is no such way."""
        raise AssertionError(f"{tag}: nccl_ep adds rows up on their way back")

    def _values(self, buffer: Tensor, num_rows: int) -> Tensor:
        back = self._spec.back
        return buffer[: num_rows * back.value_bytes].view(num_rows, back.value_bytes).view(back.dtype)

    def _fill(self, rows: Rows, words: Tensor, num_sent: int) -> None:
        """Headers, rows, and nothing up to the bucket. The buffer may hold anything before: the way back uses it."""
        size, row = self._spec.num_members, self._spec.row
        mine, rest = slice(size, size + rows.slots_NK.shape[0]), slice(size + rows.slots_NK.shape[0], num_sent)
        send = self._send
        values_MX = send.tokens.view(torch.uint8)[:, : row.value_bytes].view(row.word)
        values_MX[mine] = rows.values_NX
        send.slots[:size] = -1
        send.slots[:size, 0] = self._first_slots_R
        send.slots[mine] = rows.slots_NK
        send.slots[rest] = -1
        send.weights[:size] = 0.0
        send.weights[mine] = rows.weights_NK
        trailers_MW = send.trailers[:num_sent].view(torch.int64)
        trailers_MW[:, :TAG_WORDS] = words
        trailers_MW[:size, TAG_WORDS] = 1
        trailers_MW[size:, TAG_WORDS] = 0

    def _landed(self, words: Tensor, num_rows: int, num_sent: int) -> Landed:
        """Rows by source; a place to which nothing came, or a header, has no slot."""
        size, row, land = self._spec.num_members, self._spec.row, self._land
        live_RM = self._place_M < self._counts_R.unsqueeze(1)
        trailers_RMW = land.trailers.view(torch.int64).view(size, self._rows, TRAILER_WORDS)
        is_head_RM = trailers_RMW[:, :, TAG_WORDS] == 1
        heads_R = is_head_RM.to(torch.uint8).argmax(1) + self._begin_R  # the first: older ones lie after all that came
        self._faults.compare(trailers_RMW.flatten(0, 1)[heads_R, :TAG_WORDS], words)
        is_row_N1 = (live_RM & ~is_head_RM).view(-1, 1)
        rows = Rows(
            self._origin_N,
            land.slots.to(torch.int64).where(is_row_N1, -1),
            land.weights,
            land.tokens.view(torch.uint8)[:, : row.value_bytes].view(row.word),
        )
        return Landed(rows, NcclEpTrail(num_rows, num_sent, heads_R))
