"""A hop carries rows between the members of a part of the group, and what comes of them back again.

    send         rows leave for the members that hold any of their slots, and land there
    back_rows    one row for each that landed; what comes back for each of one's own is to be added up
    back_pairs   one row for each pair that landed, a row and one of its slots; nothing is added

    slots are counted from the group's first slot at the start, from the member's own first slot on arrival:

        slots [[0, 3], [2, -1]], members of 2 slots    ->    member 0 gets [[0, -1]], member 1 [[-1, 1], [0, -1]]

so that a hop over nodes may be followed by one inside the node, and knows nothing of it.

Legend: T tokens or rows to send, D model, K top-k, N rows that landed, M pairs, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .clock import StepClock
from .faults import Faults
from .layout import LocalPairs
from .ops import ExchangeOps
from .rows import BackFormat, RowFormat, Rows
from .subgroup import Subgroup
from .sums import Sums
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


class HopPart(NamedTuple):
    """One hop on one track: who exchanges what, in which memory, and whom it tells of ranks out of step."""

    group: Subgroup
    spec: HopSpec
    buffers: HopBuffers
    kinds: HopKinds
    ops: ExchangeOps
    faults: Faults
    clock: StepClock


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
