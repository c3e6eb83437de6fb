"""A hop that says how many rows come before it sends them: any transport, no more rows than there are; the host waits.

Legend: T tokens or rows to send, D model, K top-k, N rows that landed, M pairs, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .hops import HopPart, Landed, PairRows, rows_of
from .layout import SendLayout, own_slots, pair_order, pair_splits, send_layout
from .rows import Rows
from .sums import Sums
from .tags import check_tags
from .terms import Terms
from .transport import Pending, Tag


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

    def __init__(self, part: HopPart) -> None:
        self._group, self._spec, self._buffers, self._kinds, self._ops, *_ = part

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
