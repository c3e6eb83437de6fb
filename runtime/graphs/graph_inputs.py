"""The inputs of captured steps: one small tensor that each step is written into, and the views that lie over it.

    token     0    1    2    3          a step of two requests, one of them with a draft, in a graph of four tokens
    slot      5    5    0    0
    position  98   99   7    -1         padding: position -1 goes to no expert, place -1 is nobody's row of the cache
    place     162  163  71   -1

    row       0    1    2    3          as many rows as tokens, for each token may be a request's only one
    slot      5    0    0    0
    tokens    2    1    0    0
    context   100  8    0    0

What follows from these (the first page, where a row begins, which tokens are real) is worked out on the device, inside
the graph.

Letters: T tokens of the graph, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_mla import PagedView, PageTable, Spans, TokenColumns
from attention_mla.absorbed import Absorbed
from attention_mla.splits import DecodeRows
from attention_mla.transfer import to_device

from ..forward.batch import RequestTable
from ..requests.ledger import Column
from ..requests.rows import Rows

NOTHING = np.zeros(0, dtype=np.int64)
NUM_COLUMNS = 6


@dataclass(frozen=True, kw_only=True)
class StaticView(PagedView):
    """A view whose tokens are rows of few tokens each, or padding, whatever the step.

    track   which of the step's tracks it is of
    """

    requests: Absorbed
    track: int

    @property
    def absorbed(self) -> Absorbed:  # type: ignore[override]  # there it is made of the spans
        return self.requests


class TrackColumns(NamedTuple):
    """What a step brings to one track."""

    tokens_3T: Column
    """Slots, positions, places."""
    rows_3B: Column
    """Slots, tokens, contexts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTrack:
    """One track's inputs in static memory."""

    columns_6T: Tensor
    """int64: slots, positions, places of tokens; slots, tokens, contexts of rows."""
    number: int

    @property
    def size(self) -> int:
        return self.columns_6T.shape[1]

    def view(self, table: PageTable, *, most_context: int, row_tokens: int) -> StaticView:
        """To be called where it is recorded: what is worked out here is worked out in every replay.

        most_context   of all rows of a step together
        row_tokens     most tokens of a row
        """
        slots_T, positions_T, places_T, slots_B, num_tokens_B, context_B = self.columns_6T
        pages_SG, device = table.on_device(), self.columns_6T.device
        order_T = torch.arange(self.size, device=device)
        requests = Absorbed(
            pages_G=pages_SG.view(-1),
            first_page_B=slots_B * pages_SG.shape[1],
            first_token_B=num_tokens_B.cumsum(0) - num_tokens_B,
            num_tokens_B=num_tokens_B,
            context_B=context_B,
            total_context=most_context,
            most_tokens=row_tokens,
        )
        return StaticView(
            spans=Spans(slots_B=NOTHING, num_tokens_B=NOTHING, context_B=NOTHING, written_B=NOTHING),
            table=table,
            tokens=TokenColumns(NOTHING, NOTHING, NOTHING, NOTHING),
            max_absorbed_tokens=row_tokens,
            slots_T=slots_T,
            positions_T=positions_T,
            places_T=places_T,
            cleared_J=order_T[:0],
            decode=DecodeRows(tokens_R=order_T, block_size=table.page_size, see_each_other=row_tokens > 1, splits=()),
            prompts=(),
            requests=requests,
            track=self.number,
        )

    def write_tokens(self, columns_3T: Tensor) -> None:
        """Become these tokens, which are on the device already, and padding behind them; rows stay as they are."""
        num_tokens = columns_3T.shape[1]
        self.columns_6T[:3, :num_tokens].copy_(columns_3T)
        self.columns_6T[0, num_tokens:].fill_(0)
        self.columns_6T[1:3, num_tokens:].fill_(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInputs:
    """All tracks' inputs, parts of one tensor."""

    buffer: Tensor
    tracks: tuple[StaticTrack, ...]

    @classmethod
    def room_for(cls, size: int, num_tracks: int, device: torch.device) -> StaticInputs:
        """All padding."""
        buffer = to_device(_padding(size * num_tracks), device)
        parts = enumerate(buffer.split(size, dim=1))
        return cls(buffer=buffer, tracks=tuple([StaticTrack(columns_6T=part, number=number) for number, part in parts]))

    def write(self, columns: Sequence[TrackColumns]) -> None:
        """Become these tokens and rows, and padding behind them; one copy."""
        padded = _padding(self.buffer.shape[1])
        begin = 0
        for track, (tokens_3T, rows_3B) in zip(self.tracks, columns, strict=True):
            padded[:3, begin : begin + tokens_3T.shape[1]] = tokens_3T
            padded[3:, begin : begin + rows_3B.shape[1]] = rows_3B
            begin += track.size
        self.buffer.copy_(to_device(padded, self.buffer.device))


def _padding(size: int) -> Column:
    padded = np.zeros((NUM_COLUMNS, size), dtype=np.int64)
    padded[1:3] = -1
    return padded


def track_columns(rows: Rows, table: RequestTable) -> TrackColumns:
    """Of a track's rows; the table gets what it lacks of them."""
    spans = table.admit(rows)
    tokens = TokenColumns.of(spans)
    places_T = table.pages.places(tokens.slots_T, tokens.positions_T)
    return TrackColumns(
        np.stack([tokens.slots_T, tokens.positions_T, places_T]),
        np.stack([spans.slots_B, spans.num_tokens_B, spans.context_B]),
    )
