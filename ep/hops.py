"""A hop carries rows between the members of a part of the group, and what comes of them back again.

    send         rows leave for the members that hold any of their slots, and land there
    back_rows    one row for each that landed; what comes back for each of one's own is to be added up
    back_pairs   one row for each pair that landed, a row and one of its slots; nothing is added

    slots are counted from the group's first slot at the start, from the member's own first slot on arrival:

        slots [[0, 3], [2, -1]], members of 2 slots    ->    member 0 gets [[0, -1]], member 1 [[-1, 1], [0, -1]]

so that a hop over nodes may be followed by one inside the node, and knows nothing of it. `ExactHop` is the one that
says how many rows come before it sends them; `bounded` has the other.

Legend: T tokens or rows to send, D model, K top-k, N rows that landed, M pairs, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .layout import LocalPairs, SendLayout, own_slots, pair_order, pair_splits, send_layout
from .ops import ExchangeOps
from .rows import BackFormat, RowFormat, Rows
from .subgroup import Subgroup
from .sums import Sums
from .tags import check_tags
from .terms import Terms
from .transport import Kind, Pending, Tag

V = TypeVar("V")


class HopKinds(NamedTuple):
    """How the exchanges of a hop are called in tags."""

    header: Kind
    dispatch: Kind
    combine: Kind


FIRST = HopKinds(Kind.HEADER, Kind.DISPATCH, Kind.COMBINE)
INSIDE = HopKinds(Kind.NODE_HEADER, Kind.NODE_DISPATCH, Kind.NODE_COMBINE)
"""Of the hop inside a node, after one over nodes."""


class PairRows(NamedTuple):
    """A row for each pair of some rows, wherever it lies."""

    rows_MD: Tensor
    index_NK: Tensor
    """The place of each pair's row; -1 no pair."""
    pairs: LocalPairs | None = None
    """The same as a list, if the host has it already and rows lie in its order."""


class Landed(NamedTuple):
    """What a hop brought: rows with at least one slot here, and others with none, which carry nothing."""

    rows: Rows
    trail: Any
    """For the way back, to be opened by the hop that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopSpec:
    """The sizes of one hop.

    most_rows   rows that a rank may have to send, each to every member
    rows_back   rows that may come back for one of them
    """

    num_members: int
    slots_per_member: int
    most_rows: int
    rows_back: int
    row: RowFormat
    back: BackFormat

    @property
    def copies(self) -> int:
        """Members that one row may go to."""
        return min(self.row.top_k, self.num_members)

    @property
    def most_landing(self) -> int:
        return self.num_members * self.most_rows

    @property
    def exact_bytes(self) -> tuple[int, int]:
        """Bytes that (leave or come back, land or are given back) at most, one after the other, in an exact hop. Pairs
        are given back from where the experts left them."""
        leave, come_back = self.most_rows * self.copies, self.most_rows * self.rows_back
        return (
            max(leave * self.row.num_bytes, come_back * self.back.value_bytes),
            self.most_landing * max(self.row.num_bytes, self.back.value_bytes),
        )


class HopBuffers:
    """One hop's fixed memory on one track; each part serves the way there and then the way back."""

    def __init__(self, out: Tensor, into: Tensor) -> None:
        self.out = out
        """uint8: what leaves; then what comes back for it."""
        self.into = into
        """uint8: what lands; then what is given back for it."""

    @classmethod
    def new(cls, out_bytes: int, in_bytes: int, device: torch.device | str) -> HopBuffers:
        """Ordinary memory of a device."""
        out, into = (torch.empty(size, dtype=torch.uint8, device=device) for size in (out_bytes, in_bytes))
        return cls(out, into)


def rows_of(buffer: Tensor, num_rows: int, row_bytes: int) -> Tensor:
    """[num_rows, row_bytes] at the beginning of a buffer."""
    return buffer[: num_rows * row_bytes].view(num_rows, row_bytes)


class Hop(Protocol):
    """One rank's end of a hop. All members make the same calls in the same order."""

    def send(self, rows: Rows, *, tag: Tag, terms: Terms) -> Pending[Landed]:
        """`terms.bucket`: most tokens that any rank has in this round."""
        ...

    def back_rows(self, sums: Sums, trail: Any, *, tag: Tag) -> Pending[Sums]:
        """`sums` has a result for each row that landed. The value has one for each row that was sent: the sum over
        members, in their order, of what they gave back."""
        ...

    def back_pairs(self, pairs: PairRows, trail: Any, *, tag: Tag) -> Pending[PairRows]:
        """The pairs of the rows that were sent, in the dtype of the wire."""
        ...


def relay(value: V, legs: Sequence[Callable[[V], Pending[V]]]) -> Pending[V]:
    """The first leg starts now, each other one when the one before it is waited for: in one order on all ranks."""
    first, *others = legs
    pending = first(value)
    for leg in others:
        pending = _after(pending, leg)
    return pending


def _after(before: Pending[V], leg: Callable[[V], Pending[V]]) -> Pending[V]:
    return before.then(lambda value: leg(value).wait())


@dataclass(frozen=True, slots=True, eq=False)
class ExactTrail:
    """What one rank sent in a hop, and got."""

    layout: SendLayout
    slots_TK: Tensor
    recv_splits: Sequence[int]
    """Rows that came from each member."""
    send_pairs: Sequence[int]
    """Pairs that each member computes for this rank."""
    recv_pairs: Sequence[int]
    """Pairs that this rank computes for each."""


class ExactHop:
    """Counts first, then as many rows as there are.

    header   tag and counts to every member; a rank at another place of the program is found here, on the host
    rows     one packed row per (row, member)
    """

    def __init__(self, group: Subgroup, spec: HopSpec, buffers: HopBuffers, kinds: HopKinds, ops: ExchangeOps) -> None:
        self._group = group
        self._spec = spec
        self._buffers = buffers
        self._kinds = kinds
        self._ops = ops

    def send(self, rows: Rows, *, tag: Tag, terms: Terms) -> Pending[Landed]:  # noqa: ARG002  # counts tell all
        """Waits for the header, not for the rows."""
        row = self._spec.row
        trail = self._agree(rows.slots_NK, tag)
        send_NB = rows_of(self._buffers.out, sum(trail.layout.splits), row.num_bytes)
        self._ops.pack(row, rows, trail.layout.tokens_N, send_NB)
        landing = self._group.all_to_all(
            rows_of(self._buffers.into, sum(trail.recv_splits), row.num_bytes),
            send_NB,
            recv_splits=trail.recv_splits,
            send_splits=trail.layout.splits,
            tag=tag._replace(kind=self._kinds.dispatch),
        )
        return landing.then(lambda rows_NB: Landed(self._unpack(rows_NB), trail))

    def back_rows(self, sums: Sums, trail: ExactTrail, *, tag: Tag) -> Pending[Sums]:
        send_ND = self._values(self._buffers.into, sums.index_NJ.shape[0])
        self._ops.add(sums, send_ND)
        rows = self._group.all_to_all(
            self._values(self._buffers.out, sum(trail.layout.splits)),
            send_ND,
            recv_splits=trail.layout.splits,
            send_splits=trail.recv_splits,
            tag=tag._replace(kind=self._kinds.combine),
        )
        return rows.then(lambda rows_ND: Sums(rows_ND, trail.layout.rows_TJ))

    def back_pairs(self, pairs: PairRows, trail: ExactTrail, *, tag: Tag) -> Pending[PairRows]:
        order_M = pairs.index_NK[pairs.index_NK >= 0]
        rows = self._group.all_to_all(
            self._values(self._buffers.out, sum(trail.send_pairs)),
            pairs.rows_MD.index_select(0, order_M).to(self._spec.back.dtype),
            recv_splits=trail.send_pairs,
            send_splits=trail.recv_pairs,
            tag=tag._replace(kind=self._kinds.combine),
        )
        index_TK = pair_order(trail.slots_TK, slots_per_rank=self._spec.slots_per_member)
        return rows.then(lambda rows_MD: PairRows(rows_MD, index_TK))

    def _values(self, buffer: Tensor, num_rows: int) -> Tensor:
        back = self._spec.back
        return rows_of(buffer, num_rows, back.value_bytes).view(back.dtype)

    def _agree(self, slots_TK: Tensor, tag: Tag) -> ExactTrail:
        """Tell every member where this one is and how much comes; learn the same of them."""
        size, group = self._spec.slots_per_member, self._group
        layout = send_layout(slots_TK, slots_per_rank=size, num_ranks=group.size)
        send_pairs = pair_splits(slots_TK, slots_per_rank=size, num_ranks=group.size)
        tag = tag._replace(kind=self._kinds.header)
        words = [[*tag, *counts] for counts in zip(layout.splits, send_pairs, strict=True)]
        send = torch.tensor(words, dtype=torch.int64, device=slots_TK.device)
        ones = (1,) * group.size
        heard = group.all_to_all(torch.empty_like(send), send, recv_splits=ones, send_splits=ones, tag=tag).wait()
        *tags, recv_splits, recv_pairs = zip(*heard.tolist(), strict=True)
        check_tags(list(zip(*tags, strict=True)), rank=group.members[group.rank], ranks=group.members)
        return ExactTrail(layout, slots_TK, recv_splits, send_pairs, recv_pairs)

    def _unpack(self, rows_NB: Tensor) -> Rows:
        rows = self._spec.row.fields(rows_NB)
        size = self._spec.slots_per_member
        return rows._replace(slots_NK=own_slots(rows.slots_NK, member=self._group.rank, slots_per_member=size))
