"""From the rows of a committed step to the tensors the decoder and the sampler read, and back.

Knows the request table (which tokens sit in which slot) and the shape of a step; does not know why a row was chosen.

Shapes: T tokens here, B positions that get logits, S context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_mla import PagedView, Span

from .request import Request
from .rows import Row


class TokenTable:
    """Every running request's tokens on the device: tokens[slot, position], int64 [max_num_seqs, max_model_len + 1].

    The host writes a request once when it enters a slot (and its drafts each step); sampled ids are written by the
    step that samples them, so the next step can be launched before the host has read them.
    """

    def __init__(self, num_slots: int, max_len: int, *, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, max_len + 1, dtype=torch.int64, device=device)
        self._owner: list[tuple[Request, int] | None] = [None] * num_slots

    def admit(self, rows: Sequence[Row]) -> None:
        """Write what the device does not have yet: requests new in their slot, whole, and the drafts of this step."""
        for row in rows:
            request, slot = row.request, _slot(row.request)
            stay = (request, request.num_preemptions)  # the object: an id may come again
            if self._owner[slot] != stay:
                self._owner[slot] = stay
                self._write(slot, 0, request.tokens)
            if row.num_drafts:
                self._write(slot, row.start + row.num_tokens - row.num_drafts, request.drafts[: row.num_drafts])

    def _write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        self.tokens[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)


def _slot(request: Request) -> int:
    assert request.slot is not None, f"request {request.id} runs without a slot"
    return request.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's rows as tensors.

    slots_T, positions_T   where each token's id lies in the table
    view                   the paged view for attention
    logit_rows_B           index into T of each token whose next one is sampled: rows in order, positions ascending
    """

    rows: tuple[Row, ...]
    slots_T: Tensor
    positions_T: Tensor
    view: PagedView
    logit_rows_B: Tensor

    @classmethod
    def build(cls, rows: Sequence[Row], *, page_size: int, device: torch.device) -> StepBatch:
        """Lay the rows out one after the other; no rows give empty tensors, as on an idle rank."""
        spans = [
            Span(num_tokens=row.num_tokens, context_len=row.start + row.num_tokens, pages=row.request.pages)
            for row in rows
        ]
        slots = [_slot(row.request) for row in rows for _ in range(row.num_tokens)]
        view = PagedView.build(spans, page_size=page_size, device=device)
        logit_rows, end = [], 0
        for row in rows:
            end += row.num_tokens
            if row.samples:
                logit_rows.extend(range(end - 1 - row.num_drafts, end))
        return cls(
            rows=tuple(rows),
            slots_T=torch.tensor(slots, dtype=torch.int64, device=device),
            positions_T=view.positions_T,
            view=view,
            logit_rows_B=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )
