"""The inputs of captured steps: one small tensor that each step is written into, and the view that lies over it.

    token     0    1    2    3          a step of two requests in a graph of four tokens
    slot      5    0    0    0
    position  99   7   -1   -1          padding: position -1 goes to no expert, place -1 is nobody's row of the cache
    place     163  71  -1   -1

What follows from these (contexts, the first page, which tokens are real) is worked out on the device, inside the graph.

Letters: T tokens of the graph, B rows, one a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class StaticView(PagedView):
    """A view whose tokens are requests of one token each, or padding, whatever the step."""

    requests: Absorbed

    @property
    def absorbed(self) -> Absorbed:  # type: ignore[override]  # there it is made of the spans
        return self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTrack:
    """One track's inputs in static memory."""

    columns_3T: Tensor
    """int64: slots, positions, places."""

    @property
    def size(self) -> int:
        return self.columns_3T.shape[1]

    @property
    def slots_T(self) -> Tensor:
        return self.columns_3T[0]

    @property
    def positions_T(self) -> Tensor:
        return self.columns_3T[1]

    def view(self, table: PageTable, *, most_context: int) -> StaticView:
        """To be called where it is recorded: what is worked out here is worked out in every replay.

        most_context   of all requests of a step together
        """
        slots_T, positions_T, places_T = self.columns_3T
        pages_SG, device = table.on_device(), self.columns_3T.device
        order_T = torch.arange(self.size, device=device)
        requests = Absorbed(
            pages_G=pages_SG.view(-1),
            first_page_B=slots_T * pages_SG.shape[1],
            first_token_B=order_T,
            num_tokens_B=(positions_T >= 0).to(torch.int64),
            context_B=positions_T + 1,
            total_context=most_context,
            most_tokens=1,
        )
        return StaticView(
            spans=Spans(slots_B=NOTHING, num_tokens_B=NOTHING, context_B=NOTHING, written_B=NOTHING),
            table=table,
            tokens=TokenColumns(NOTHING, NOTHING, NOTHING, NOTHING),
            max_absorbed_tokens=1,
            slots_T=slots_T,
            positions_T=positions_T,
            places_T=places_T,
            cleared_J=order_T[:0],
            decode=DecodeRows(tokens_R=order_T, block_size=table.page_size, see_each_other=False, splits=()),
            prompts=(),
            requests=requests,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInputs:
    """All tracks' inputs, parts of one tensor."""

    buffer: Tensor
    tracks: tuple[StaticTrack, ...]

    @classmethod
    def room_for(cls, size: int, num_tracks: int, device: torch.device) -> StaticInputs:
        """All padding."""
        buffer = torch.full((3, size * num_tracks), -1, dtype=torch.int64, device=device)
        buffer[0] = 0
        return cls(buffer=buffer, tracks=tuple([StaticTrack(columns_3T=part) for part in buffer.split(size, dim=1)]))

    def write(self, columns: Sequence[Column]) -> None:
        """Become these tokens, [3, T] of each track, and padding behind them; one copy."""
        padded = np.empty(self.buffer.shape, dtype=np.int64)
        padded[0], padded[1:] = 0, -1
        begin = 0
        for track, each in zip(self.tracks, columns, strict=True):
            padded[:, begin : begin + each.shape[1]] = each
            begin += track.size
        self.buffer.copy_(to_device(padded, self.buffer.device))

    def write_there(self, columns_3T: Tensor) -> None:
        """The same of a single track whose tokens are on the device already."""
        num_tokens = columns_3T.shape[1]
        self.buffer[:, :num_tokens].copy_(columns_3T)
        self.buffer[0, num_tokens:].fill_(0)
        self.buffer[1:, num_tokens:].fill_(-1)


def one_token_each(rows: Rows) -> bool:
    """Whether each row computes one token, and samples the next."""
    return bool((rows.num_tokens_B == 1).all() and (rows.num_sampled_B == 1).all())


def token_columns(rows: Rows, table: RequestTable) -> Column:
    """[3, T] slots, positions and places of the rows' tokens; the table gets what it lacks of them."""
    tokens = TokenColumns.of(table.admit(rows))
    places_T = table.pages.places(tokens.slots_T, tokens.positions_T)
    return np.stack([tokens.slots_T, tokens.positions_T, places_T])
