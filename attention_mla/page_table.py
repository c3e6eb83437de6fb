"""Spans as columns on the host, and the page table that says where their tokens lie.

The host knows every page that it hands out, so places are worked out there and sent; kernels that look pages up
themselves get a copy of the table, in which only lines that changed are written again.

A line of the table holds a request's pages in order; behind the last page that was begun, that one is repeated. In the
step that begins a page it is cleared, and so is what an earlier step wrote past the context (drafts that were wrong, a
step that is run again). Whoever reads along a line past its context finds zeros, and what this very step appends:

  pages of 64, context 80       line    7 2 2 2 2 ..        page 2: 16 latents, then zeros

Knows slots, pages and positions by number; does not know what lies in a page, or who wrote the table.

Letters: B spans, T tokens here, R decode rows, S slots, G pages or blocks of a request, J places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .transfer import to_device

__all__ = ["Column", "PageTable", "Spans", "TokenColumns"]

Column = NDArray[np.int64]
"""int64, one axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Consecutive tokens that requests compute in this step, a column entry a request; on the host."""

    slots_B: Column
    """The request's line of the page table."""
    num_tokens_B: Column
    """The last so many of the context."""
    context_B: Column
    """Tokens of the request in the cache once this step's are appended."""
    written_B: Column
    """Where the request's part of the cache ends that earlier steps wrote, counted or not."""

    def check(self, room: int) -> None:
        """Asserts that every span has tokens, and a context that fits a line of the page table."""
        num_tokens_B, context_B = self.num_tokens_B, self.context_B
        good_B = (num_tokens_B >= 1) & (num_tokens_B <= context_B) & (context_B <= room)
        if not good_B.all():
            worst = int(good_B.argmin())
            raise AssertionError(f"{num_tokens_B[worst]} tokens in a context of {context_B[worst]}, room for {room}")


class TokenColumns(NamedTuple):
    """All tokens of the spans, one span after the other; on the host."""

    first_B: Column
    """Index into T of each span's first token."""
    span_T: Column
    slots_T: Column
    positions_T: Column

    @classmethod
    def of(cls, spans: Spans) -> Self:
        """Spans lie as they come."""
        num_tokens_B = spans.num_tokens_B
        end_B = num_tokens_B.cumsum()
        span_T = np.arange(len(num_tokens_B)).repeat(num_tokens_B)
        positions_T = np.arange(len(span_T)) + (spans.context_B - end_B)[span_T]
        return cls(end_B - num_tokens_B, span_T, spans.slots_B[span_T], positions_T)


class PageTable:
    """The pages of all requests, a line a slot; int64."""

    def __init__(self, num_slots: int, num_pages: int, *, page_size: int, device: torch.device | str = "cpu") -> None:
        """Lines of `num_pages` pages, which are as many as a request can have."""
        self.page_size = page_size
        self.pages_SG = np.zeros((num_slots, num_pages), dtype=np.int64)
        self._on_device = torch.zeros(num_slots, num_pages, dtype=torch.int64, device=device)
        self._changed: set[int] = set()

    def write(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """A request's pages from number `first` on; the last of them is being begun."""
        line_G = self.pages_SG[slot, first:]
        line_G[: len(pages)] = pages
        line_G[len(pages) :] = pages[-1]
        self._changed.add(slot)

    def on_device(self) -> Tensor:
        """[S, G] the table where kernels can read it."""
        if self._changed:
            slots = sorted(self._changed)
            device = self._on_device.device
            self._on_device.index_copy_(0, to_device(np.array(slots), device), to_device(self.pages_SG[slots], device))
            self._changed.clear()
        return self._on_device

    def send(self, columns: Sequence[Column]) -> tuple[Tensor, ...]:
        """Columns on the device, in one copy."""
        sizes = [len(column) for column in columns]
        return to_device(np.concatenate(columns), self._on_device.device).split_with_sizes(sizes)

    def places(self, slots: Column | int, positions: Column) -> Column:
        """Places of `positions` in the requests of `slots`."""
        return self.pages_SG[slots, positions // self.page_size] * self.page_size + positions % self.page_size

    def cleared(self, spans: Spans) -> Column:
        """Places to clear before a step appends: pages that it leaves half filled, and what lies past its contexts."""
        last_B = spans.context_B - 1
        (begun_B,) = (last_B % self.page_size < spans.num_tokens_B).nonzero()
        pages_F1 = self.pages_SG[spans.slots_B[begun_B], last_B[begun_B] // self.page_size, None]
        places_J = (pages_F1 * self.page_size + np.arange(self.page_size)).ravel()
        num_left_B = spans.written_B - spans.context_B
        if num_left_B.max(initial=0) <= 0:
            return places_J
        left_J = [
            self.places(slot, np.arange(context, written))
            for slot, context, written in zip(spans.slots_B, spans.context_B, spans.written_B, strict=True)
        ]
        return np.concatenate((places_J, *left_J))

    def blocks(self, slots_R: Column, num_blocks: int, block_size: int) -> Column:
        """[R, num_blocks] the first blocks of some requests: pages cut in pieces of `block_size`."""
        per_page = self.page_size // block_size
        pages_RG = self.pages_SG[slots_R, : -(-num_blocks // per_page)]
        if per_page > 1:
            pages_RG = (pages_RG[:, :, None] * per_page + np.arange(per_page)).reshape(
                len(slots_R), pages_RG.shape[1] * per_page
            )
        return pages_RG[:, :num_blocks]
