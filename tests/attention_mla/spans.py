"""For these tests: spans as a list, each with its pages, and the view of them over a page table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_mla import PagedView, PageTable, Spans


class Span(NamedTuple):
    """One request's share of a step, with its pages."""

    num_tokens: int
    context_len: int
    pages: Sequence[int]
    written: int | None = None
    """None: as far as the tokens of this step."""


STALE = 10**6
"""A page that no cache has: whoever looks at another slot's line gets an error."""


def view_of(spans: Sequence[Span], *, page_size: int, **options: Any) -> PagedView:
    """The view of these spans; their pages lie in a page table in slots of another order, with one slot unused."""
    count = len(spans)
    slots = [count - index for index in range(count)]
    most = 1 + max([len(span.pages) for span in spans], default=0)
    table = PageTable(count + 1, most, page_size=page_size)
    table.write(0, 0, [STALE] * most)
    for slot, span in zip(slots, spans, strict=True):
        end = max(span.context_len, span.written or 0)
        table.write(slot, 0, span.pages[: -(-end // page_size)])
    columns = Spans(
        slots_B=np.array(slots, dtype=np.int64),
        num_tokens_B=np.array([span.num_tokens for span in spans], dtype=np.int64),
        context_B=np.array([span.context_len for span in spans], dtype=np.int64),
        written_B=np.array(
            [span.context_len - span.num_tokens if span.written is None else span.written for span in spans],
            dtype=np.int64,
        ),
    )
    return PagedView.build(columns, table, **options)
