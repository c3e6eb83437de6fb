"""The paged view: everything about one step's attention that does not depend on the layer.

It turns spans (request pieces of this step) into index tensors once a step, so that a layer only gathers and
multiplies. Knows pages by number; what lies in them is the cache's.

How a context is cut. Keys are cut at multiples of a fixed length, counted from the request's own position 0, so that
neither batch mates nor the size of a prompt chunk move it:

  decode row, context 600:
      keys     [0 .. 256)  [256 .. 512)  [512 .. 600)      splits of `split_tokens`
  prompt, positions 900 .. 1400, context 1400:
      keys     [0 .. 1024)  [1024 .. 1400)                 chunks of `context_chunk`
      queries  [900 .. 1156)  [1156 .. 1400)               blocks of `query_block`, counted from the span's start

Letters: T tokens here, R decode rows, S positions of one split or chunk, G pages, P places of a page.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

UNSEEN = -1e30
"""Added to a score that must not count. Finite, so that a row that sees nothing of a piece still yields numbers, which
then get the weight exp(-1e30) = 0 in the merge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens that one request computes in this step: the last `num_tokens` of its context."""

    num_tokens: int
    context_len: int
    """Tokens of the request in the cache once this step's are appended."""
    pages: Sequence[int]
    """The request's pages in order; those past the context are not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How much is looked at at once: memory and speed, never the result (beyond rounding). Raises ValueError below 1.

    Per layer at most (decode rows * split_tokens) latents are gathered, (context_chunk) prompt tokens are up-projected
    and (heads * query_block * context_chunk) scores exist.
    """

    split_tokens: int = 256
    """Context positions that a decode row gathers at once: few enough that a batch's latents stay in a CPU's cache."""
    context_chunk: int = 1024
    """Context positions of a prompt that are up-projected to keys and values at once."""
    query_block: int = 256
    """Prompt tokens whose scores against one context chunk exist at once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} = {getattr(self, field.name)}: must be at least 1 (usual: {field.default})"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSplit:
    """One split of the context for the rows that reach it: the first `num_rows` of `DecodeRows.tokens_R`."""

    num_rows: int
    places: Tensor
    """int64 [num_rows * S]. Past a row's end its own last token is repeated: never another request's latents."""
    bias_R1S: Tensor | None
    """float32: UNSEEN past a row's end, 0 before it; None where every row fills the split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """Query tokens that attend by themselves, absorbed. Longest context first, so that a split's rows are a prefix."""

    tokens_R: Tensor
    """int64, index into T."""
    splits: tuple[DecodeSplit, ...]

    @property
    def num_rows(self) -> int:
        return self.tokens_R.shape[0]


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


class _PageTable(NamedTuple):
    """The pages of all spans end to end, so that ragged page lists need no padding."""

    pages_G: Tensor
    first_B: Tensor
    page_size: int

    def places(self, span: Tensor | int, positions: Tensor) -> Tensor:
        """Places of `positions` in the requests of `span` (broadcast against each other)."""
        page = self.pages_G[self.first_B[span] + positions // self.page_size]
        return page * self.page_size + positions % self.page_size


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedView:
    """Where this step's tokens stand and what they attend to. Tokens are in span order. Zero tokens are ordinary."""

    positions_T: Tensor
    """int64."""
    places_T: Tensor
    """int64: where each token's latent is appended."""
    decode: DecodeRows
    prompts: tuple[Prompt, ...]

    @property
    def num_tokens(self) -> int:
        return self.positions_T.shape[0]

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        *,
        page_size: int,
        max_absorbed_tokens: int = 4,
        device: torch.device | str = "cpu",
        tiling: Tiling = Tiling(),
    ) -> "PagedView":
        """Spans of at most `max_absorbed_tokens` tokens become decode rows, one a token; the others are prompts."""
        for span in spans:
            _check(span, page_size)
        table = _page_table(spans, page_size, device)
        counts = [span.num_tokens for span in spans]
        first_tokens = list(itertools.accumulate(counts, initial=0))
        counts_B = torch.tensor(counts, dtype=torch.int64, device=device)
        span_T = torch.repeat_interleave(counts_B, output_size=first_tokens[-1])
        shift_B = [span.context_len - span.num_tokens - first for span, first in zip(spans, first_tokens, strict=False)]
        tokens_T = torch.arange(first_tokens[-1], device=device)
        positions_T = tokens_T + torch.tensor(shift_B, dtype=torch.int64, device=device)[span_T]
        absorbed = [index for index, span in enumerate(spans) if span.num_tokens <= max_absorbed_tokens]
        upprojected = [index for index, span in enumerate(spans) if span.num_tokens > max_absorbed_tokens]
        return cls(
            positions_T=positions_T,
            places_T=table.places(span_T, positions_T),
            decode=_decode_rows([(index, spans[index], first_tokens[index]) for index in absorbed], table, tiling),
            prompts=tuple(_prompt(index, spans[index], first_tokens[index], table, tiling) for index in upprojected),
        )


def _check(span: Span, page_size: int) -> None:
    assert 1 <= span.num_tokens <= span.context_len, f"{span.num_tokens} tokens in a context of {span.context_len}"
    room = len(span.pages) * page_size
    assert span.context_len <= room, f"a context of {span.context_len} on {len(span.pages)} pages of {page_size}"


def _page_table(spans: Sequence[Span], page_size: int, device: torch.device | str) -> _PageTable:
    used = [math.ceil(span.context_len / page_size) for span in spans]
    pages = [page for span, count in zip(spans, used, strict=True) for page in span.pages[:count]]
    first = list(itertools.accumulate(used, initial=0))[:-1]
    return _PageTable(
        pages_G=torch.tensor(pages, dtype=torch.int64, device=device),
        first_B=torch.tensor(first, dtype=torch.int64, device=device),
        page_size=page_size,
    )


def _decode_rows(placed: Sequence[tuple[int, Span, int]], table: _PageTable, tiling: Tiling) -> DecodeRows:
    """Rows from (span index, span, its first token in T), longest context first."""
    rows = [
        (span.context_len - span.num_tokens + offset + 1, index, first_token + offset)
        for index, span, first_token in placed
        for offset in range(span.num_tokens)
    ]
    rows.sort(key=lambda row: -row[0])
    rows_R3 = torch.tensor(rows, dtype=torch.int64, device=table.pages_G.device).view(-1, 3)
    context_R, span_R, tokens_R = rows_R3.unbind(1)
    negated = [-context_len for context_len, _, _ in rows]  # ascending, for bisect
    longest = rows[0][0] if rows else 0
    splits = []
    for start in range(0, longest, tiling.split_tokens):
        end = min(start + tiling.split_tokens, longest)
        num_rows = bisect_right(negated, -(start + 1))
        some_end_here = rows[num_rows - 1][0] < end
        splits.append(_decode_split(context_R[:num_rows], span_R[:num_rows], range(start, end), some_end_here, table))
    return DecodeRows(tokens_R=tokens_R.contiguous(), splits=tuple(splits))


def _decode_split(
    context_R: Tensor, span_R: Tensor, positions: range, some_end_here: bool, table: _PageTable
) -> DecodeSplit:
    places_RS = _places_by_page(context_R, span_R, positions, some_end_here, table)
    bias_R1S = None
    if some_end_here:
        positions_S = torch.arange(positions.start, positions.stop, device=context_R.device)
        bias_R1S = _bias(positions_S >= context_R.unsqueeze(1)).unsqueeze(1)
    return DecodeSplit(num_rows=context_R.shape[0], places=places_RS.flatten(), bias_R1S=bias_R1S)


def _places_by_page(
    context_R: Tensor, span_R: Tensor, positions: range, some_end_here: bool, table: _PageTable
) -> Tensor:
    """[R, S] places of `positions`, those past a row's context being its last token's own.

    A page at a time: divisions and look-ups for every position would be most of the host's work in a decode step.
    """
    size = table.page_size
    first, stop = positions.start // size, -(-positions.stop // size)
    page_G = torch.arange(first, stop, device=context_R.device)
    last_R1 = (context_R - 1).unsqueeze(1)
    page_RG = table.pages_G[table.first_B[span_R].unsqueeze(1) + torch.minimum(page_G, last_R1 // size)] * size
    offset_P = torch.arange(size, device=context_R.device)
    if some_end_here:
        last_RG1 = (last_R1 - page_G * size).unsqueeze(2)  # offset of the row's last token; negative on pages past it
        offset_RGP = torch.minimum(offset_P, last_RG1).where(last_RG1 >= 0, (last_R1 % size).unsqueeze(2))
        places_RGP = page_RG.unsqueeze(2) + offset_RGP
    else:
        places_RGP = page_RG.unsqueeze(2) + offset_P
    return places_RGP.flatten(1)[:, positions.start - first * size : positions.stop - first * size]


def _prompt(index: int, span: Span, first_token: int, table: _PageTable, tiling: Tiling) -> Prompt:
    start = span.context_len - span.num_tokens
    blocks = [
        range(begin, min(begin + tiling.query_block, span.context_len))
        for begin in range(start, span.context_len, tiling.query_block)
    ]
    chunks = []
    for begin in range(0, span.context_len, tiling.context_chunk):
        keys = range(begin, min(begin + tiling.context_chunk, span.context_len))
        first_block = next(number for number, block in enumerate(blocks) if block[-1] >= begin)
        keys_S = torch.arange(keys.start, keys.stop, device=table.pages_G.device)
        biases = tuple(_future_bias(block, keys_S, keys) for block in blocks[first_block:])
        chunks.append(ContextChunk(places_S=table.places(index, keys_S), first_block=first_block, biases=biases))
    tokens = slice(first_token, first_token + span.num_tokens)
    return Prompt(tokens=tokens, block=tiling.query_block, chunks=tuple(chunks))


def _future_bias(queries: range, keys_S: Tensor, keys: range) -> Tensor | None:
    if keys[-1] <= queries[0]:
        return None
    queries_Q1 = torch.arange(queries.start, queries.stop, device=keys_S.device).unsqueeze(1)
    return _bias(keys_S > queries_Q1)


def _bias(unseen: Tensor) -> Tensor:
    return torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, UNSEEN)
