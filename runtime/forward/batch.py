"""From the rows of a committed step to the tensors that the decoder and the sampler read.

Knows the request table (which tokens and pages sit in which slot) and the shape of a step; does not know why a row was
chosen. A few columns of the rows go to the device; what is long - tokens and pages - is there already, but for what
this step begins.

Shapes: S slots, T tokens here, B rows or positions that get logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention_mla import PagedView, PageTable, Spans, TokenColumns
from attention_mla.transfer import to_device

from ..requests.ledger import Column
from ..requests.request import Request
from ..requests.rows import Row, Rows
from ..sampling.prompt_logprobs import PromptPart, asked_parts, positions


class RequestTable:
    """What the device holds of every running request, a line a slot.

    tokens   int64 [max_num_seqs, max_model_len + 1]
    pages    see `attention_mla.page_table`

    The host writes a request's tokens once when it enters a slot (and its drafts each step), and its pages in the step
    that begins one. Sampled ids are written by the step that samples them, so the next step can be launched before the
    host has read them.
    """

    def __init__(self, num_slots: int, max_len: int, *, page_size: int, device: torch.device) -> None:
        self.pages = PageTable(num_slots, -(-max_len // page_size), page_size=page_size, device=device)
        self.tokens = torch.zeros(num_slots, max_len + 1, dtype=torch.int64, device=device)
        # A request gets a new list of pages whenever it is admitted, so the list itself tells one stay from another.
        self._stays: list[list[int] | None] = [None] * num_slots
        self._written_S = np.zeros(num_slots, dtype=np.int64)  # how far into the cache steps of this stay have come

    def admit(self, rows: Rows) -> Spans:
        """Write what the device does not have yet: of requests new in their slot, of begun pages, and drafts.

        A request enters its slot at the start of a page (or by `enter`), and a page is begun by its first position; all
        other rows are passed over without a look. Returns the spans that the rows compute.
        """
        slots_B, context_B, page_size = rows.slot_B, rows.end_B, self.pages.page_size
        begins_B = (context_B - 1) // page_size > (rows.start_B - 1) // page_size
        for index in begins_B.nonzero()[0].tolist():
            self._write_pages(int(slots_B[index]), rows[index])
        for index in (rows.num_sampled_B > 1).nonzero()[0].tolist():
            row = rows[index]
            self._write(int(slots_B[index]), row.end - row.num_drafts, row.request.drafts[: row.num_drafts])
        written_B = self._written_S[slots_B]
        self._written_S[slots_B] = np.maximum(written_B, context_B)
        return Spans(slots_B=slots_B, num_tokens_B=rows.num_tokens_B, context_B=context_B, written_B=written_B)

    def enter(self, request: Request, *, start: int) -> None:
        """A request that runs from now on, whose first `start` tokens are in its pages; the rest of a page may be."""
        slot = request.slot
        assert slot is not None, f"request {request.id} has no slot"
        self._take_in(slot, request, start=start)
        self.pages.write(slot, 0, request.pages[: -(-start // self.pages.page_size)])

    def _take_in(self, slot: int, request: Request, *, start: int) -> None:
        self._stays[slot] = request.pages
        self._write(slot, 0, request.tokens)
        self._written_S[slot] = start

    def _write_pages(self, slot: int, row: Row) -> None:
        """Those that the row begins; all, and the tokens, of a request that is new in its slot."""
        request, first, end = row.request, row.start // self.pages.page_size, -(-row.end // self.pages.page_size)
        if self._stays[slot] is not request.pages:
            self._take_in(slot, request, start=row.start)
            first = 0
        assert len(request.pages) >= end, f"a context of {row.end} on {len(request.pages)} pages"
        self.pages.write(slot, first, request.pages[first:end])

    def _write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        self.tokens[slot, start : start + len(tokens)] = to_device(np.array(tokens, dtype=np.int64), self.tokens.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's rows as tensors.

    view            the paged view for attention; its slots_T and positions_T say where each token's id is in the table
    logit_rows_B    index into T of each token whose next one is sampled: rows in order, positions ascending
    slots_B, positions_B   where in the table the sampled tokens go
    prompts         what is asked of prompts in it; prompt_rows_P says where among its tokens, None for nothing
    """

    rows: Rows
    view: PagedView
    logit_rows_B: Tensor
    slots_B: Tensor
    positions_B: Tensor
    prompts: Sequence[PromptPart] = ()
    prompt_rows_P: Tensor | None = None

    @classmethod
    def build(cls, rows: Rows, table: RequestTable) -> StepBatch:
        """Lay the rows out one after the other, and write what the table lacks of them; the same rows may come again.

        No rows give empty tensors, as on an idle rank.
        """
        view = PagedView.build(table.admit(rows), table.pages)
        tokens, logit_rows_B = view.tokens, _sampled(view.tokens, rows)
        sent = table.pages.send((logit_rows_B, tokens.slots_T[logit_rows_B], tokens.positions_T[logit_rows_B] + 1))
        prompts = asked_parts(rows, tokens.first_B) if rows.is_prefill_B.any() else ()
        return cls(
            rows=rows,
            view=view,
            logit_rows_B=sent[0],
            slots_B=sent[1],
            positions_B=sent[2],
            prompts=prompts,
            prompt_rows_P=positions(prompts).to(logit_rows_B.device) if prompts else None,
        )


def _sampled(tokens: TokenColumns, rows: Rows) -> Column:
    """Index into T of the last `num_sampled` tokens of each row."""
    first_sampled_B = tokens.first_B + rows.num_tokens_B - rows.num_sampled_B
    (sampled_B,) = (np.arange(len(tokens.span_T)) >= first_sampled_B[tokens.span_T]).nonzero()
    return sampled_B
