"""The paged view: everything about one step's attention that does not depend on the layer.

It turns spans (request pieces of this step) into index tensors once a step, so that a layer only gathers and
multiplies. Columns of the spans are worked out on the host; the pages stay on their device. Knows pages by number; what
lies in them is the cache's.

How a context is cut. Keys are cut at multiples of a fixed length, counted from the request's own position 0, so that
neither batch mates nor the size of a prompt chunk move it:

  decode row, context 600:
      keys     [0 .. 256)  [256 .. 512)  [512 .. 600)      splits of `split_tokens`
  prompt, positions 900 .. 1400, context 1400:
      keys     [0 .. 1024)  [1024 .. 1400)                 chunks of `context_chunk`
      queries  [900 .. 1156)  [1156 .. 1400)               blocks of `query_block`, counted from the span's start

Letters: B spans, T tokens here, S positions of one chunk, J places.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .absorbed import Absorbed
from .page_table import PageTable, Spans, TokenColumns
from .splits import UNSEEN, DecodeRows, decode_rows
from .tiling import USUAL_TILING, Tiling


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextChunk:
    """One chunk of a prompt's context, and which query blocks see it: those from `first_block` on."""

    places_S: Tensor
    first_block: int
    biases: tuple[Tensor | None, ...]
    """One a block from `first_block` on: float32 [block, S], UNSEEN on keys in a query's future; None without such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A span whose tokens attend together, with keys and values up-projected."""

    tokens: slice
    """Of T."""
    block: int
    """Query tokens a block."""
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, kw_only=True)
class PagedView:
    """Where this step's tokens stand and what they attend to. Tokens are in span order. Zero tokens are ordinary."""

    spans: Spans
    table: PageTable
    tokens: TokenColumns
    """The tokens on the host."""
    max_absorbed_tokens: int

    slots_T: Tensor
    """int64: each token's line of the page table."""
    positions_T: Tensor
    """int64."""
    places_T: Tensor
    """int64: where each token's latent is appended."""
    cleared_J: Tensor
    """int64: places to clear before anything is appended (see `page_table`)."""
    decode: DecodeRows
    """The tokens of short spans, cut for attention in torch."""
    prompts: tuple[Prompt, ...]

    @property
    def num_tokens(self) -> int:
        return self.positions_T.shape[0]

    @classmethod
    def build(
        cls,
        spans: Spans,
        table: PageTable,
        *,
        max_absorbed_tokens: int = 4,
        tiling: Tiling = USUAL_TILING,
    ) -> "PagedView":
        """Spans of at most `max_absorbed_tokens` tokens become decode rows, one a token; the others are prompts."""
        spans.check(room=table.pages_SG.shape[1] * table.page_size)
        tokens = TokenColumns.of(spans)
        places_T = table.places(tokens.slots_T, tokens.positions_T)
        sent = table.send((tokens.slots_T, tokens.positions_T, places_T, table.cleared(spans)))
        is_absorbed_B = spans.num_tokens_B <= max_absorbed_tokens
        (upprojected_B,) = (~is_absorbed_B).nonzero()
        return cls(
            spans=spans,
            table=table,
            tokens=tokens,
            max_absorbed_tokens=max_absorbed_tokens,
            slots_T=sent[0],
            positions_T=sent[1],
            places_T=sent[2],
            cleared_J=sent[3],
            decode=decode_rows(tokens, is_absorbed_B, table, tiling.split_tokens),
            prompts=tuple([_prompt(spans, b, int(tokens.first_B[b]), table, tiling) for b in upprojected_B.tolist()]),
        )

    @cached_property
    def cleared_alone_J(self) -> Tensor:
        """`cleared_J` without places that this step appends to, so that both may be done at once."""
        return self.cleared_J[~torch.isin(self.cleared_J, self.places_T)]

    @cached_property
    def absorbed(self) -> Absorbed:
        """The spans of `decode` as kernels read them; made when they are first asked for."""
        (chosen_B,) = (self.spans.num_tokens_B <= self.max_absorbed_tokens).nonzero()
        num_tokens_B, context_B = self.spans.num_tokens_B[chosen_B], self.spans.context_B[chosen_B]
        pages_SG = self.table.on_device()
        first_page = self.spans.slots_B[chosen_B] * pages_SG.shape[1]
        columns = self.table.send((first_page, self.tokens.first_B[chosen_B], num_tokens_B, context_B))
        return Absorbed(
            pages_G=pages_SG.flatten(),
            first_page_B=columns[0],
            first_token_B=columns[1],
            num_tokens_B=columns[2],
            context_B=columns[3],
            total_context=int(context_B.sum()),
            most_tokens=int(num_tokens_B.max(initial=0)),
        )


def _prompt(spans: Spans, index: int, first_token: int, table: PageTable, tiling: Tiling) -> Prompt:
    slot, num_tokens, context = int(spans.slots_B[index]), int(spans.num_tokens_B[index]), int(spans.context_B[index])
    start = context - num_tokens
    blocks = [
        range(begin, min(begin + tiling.query_block, context)) for begin in range(start, context, tiling.query_block)
    ]
    chunks = []
    for begin in range(0, context, tiling.context_chunk):
        keys = range(begin, min(begin + tiling.context_chunk, context))
        first_block = next(number for number, block in enumerate(blocks) if block[-1] >= begin)
        at_S = np.arange(keys.start, keys.stop)
        keys_S, places_S = table.send((at_S, table.places(slot, at_S)))
        biases = tuple(_future_bias(block, keys_S, keys) for block in blocks[first_block:])
        chunks.append(ContextChunk(places_S=places_S, first_block=first_block, biases=biases))
    tokens = slice(first_token, first_token + num_tokens)
    return Prompt(tokens=tokens, block=tiling.query_block, chunks=tuple(chunks))


def _future_bias(queries: range, keys_S: Tensor, keys: range) -> Tensor | None:
    if keys[-1] <= queries[0]:
        return None
    queries_Q1 = torch.arange(queries.start, queries.stop, device=keys_S.device).unsqueeze(1)
    return _bias(keys_S > queries_Q1)


def _bias(unseen: Tensor) -> Tensor:
    return torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, UNSEEN)
