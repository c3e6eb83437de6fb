"""Decode rows: which places of the cache each of them gathers, split by split.

Decode rows are gathered by *blocks*: runs of consecutive places as long as page and split allow, the greatest common
divisor of both lengths. All are read as far as the longest of them; what lies past a row's own end: see `page_table`.

  pages of 64, splits of 96: blocks of 32
      context 80     page [0 .. 64)  page [64 .. 128)          blocks [0 .. 32) [32 .. 64) [64 .. 96)
      split [0 .. 96) = three blocks; 80 .. 95 are read and score UNSEEN

Knows blocks by number; what lies in them is the cache's.

Letters: T tokens here, R decode rows, E decode rows that end in a split, S positions of one split, G blocks of a row,
K splits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .page_table import Column, PageTable, TokenColumns

__all__ = ["UNSEEN", "DecodeRows", "DecodeSplit", "decode_rows"]

UNSEEN = -1e30
"""The score of what must not count. Finite, so that a row that sees nothing of a piece still yields numbers, which
then get the weight exp(-1e30) = 0 in the merge."""


class DecodeSplit(NamedTuple):
    """One split of the context for the rows that reach it: the first `num_rows` of `DecodeRows.tokens_R`."""

    num_rows: int
    num_positions: int
    """S: the split's length, or as far as the longest context goes."""
    blocks: Tensor
    """int64 [num_rows * G], at least S places a row."""
    unseen_E1S: Tensor | None
    """bool, of the last E of these rows, which end in this split: whether a position is past their end. None: nobody
    ends here."""

    def unseen_in(self, tile: range) -> Tensor | None:
        """`unseen_E1S` of consecutive rows; the last ones of them, again. None: none of these ends here."""
        first = self.num_rows - (0 if self.unseen_E1S is None else self.unseen_E1S.shape[0])
        if self.unseen_E1S is None or tile.stop <= first:
            return None
        return self.unseen_E1S[max(tile.start - first, 0) : tile.stop - first]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """Query tokens that attend by themselves, absorbed. Longest context first, so that a split's rows are a prefix."""

    tokens_R: Tensor
    """int64, index into T."""
    block_size: int
    """Places of a block."""
    see_each_other: bool
    """Some span has several rows: past the end of one lie latents that this step appends for another."""
    splits: tuple[DecodeSplit, ...]

    @property
    def num_rows(self) -> int:
        return self.tokens_R.shape[0]


def decode_rows(
    tokens: TokenColumns, is_absorbed_B: NDArray[np.bool_], table: PageTable, split_tokens: int
) -> DecodeRows:
    """A row for each token of these spans, longest context first, then in token order."""
    block_size, num_spans = math.gcd(table.page_size, split_tokens), int(np.count_nonzero(is_absorbed_B))
    order_R = (-tokens.positions_T).argsort(kind="stable")
    if num_spans < len(is_absorbed_B):
        order_R = order_R[is_absorbed_B[tokens.span_T[order_R]]]
    last_R, slots_R = tokens.positions_T[order_R], tokens.slots_T[order_R]
    context = int(last_R[0]) + 1 if len(last_R) else 0
    reach_K = _reach(last_R, context, split_tokens)
    blocks_RG = table.blocks(slots_R, -(-context // block_size), block_size)
    step = split_tokens // block_size
    blocks_K = [blocks_RG[:num_rows, k * step : (k + 1) * step].ravel() for k, num_rows in enumerate(reach_K)]
    tokens_R, in_split_R, *sent_K = table.send((order_R, last_R % split_tokens, *blocks_K))
    unseen_K = _unseen(in_split_R, reach_K, context, split_tokens)
    lengths_K = [min(split_tokens, context - start) for start in range(0, context, split_tokens)]
    splits = map(DecodeSplit, reach_K, lengths_K, sent_K, unseen_K)
    return DecodeRows(
        tokens_R=tokens_R, block_size=block_size, see_each_other=len(order_R) > num_spans, splits=tuple(splits)
    )


def _reach(last_R: Column, context: int, split_tokens: int) -> list[int]:
    """How many rows, the first ones, reach each split."""
    return np.searchsorted(-last_R, -np.arange(0, context, split_tokens), side="right").tolist()


def _unseen(in_split_R: Tensor, reach_K: Sequence[int], context: int, split_tokens: int) -> list[Tensor | None]:
    """Each split's `unseen_E1S`. Rows end split by split, those of the last split first."""
    unseen_R1S = _unseen_after(split_tokens, in_split_R.device).index_select(0, in_split_R).unsqueeze(1)
    num_ending_K = [num_rows - goes_on for num_rows, goes_on in pairwise((*reach_K, 0))]
    unseen_K = list(unseen_R1S.split_with_sizes(num_ending_K[::-1]))[::-1] if reach_K else []
    if context % split_tokens:
        unseen_K[-1] = unseen_K[-1][:, :, : context % split_tokens]
    return [unseen_E1S if num_ending else None for unseen_E1S, num_ending in zip(unseen_K, num_ending_K, strict=True)]


@cache
def _unseen_after(split_tokens: int, device: torch.device) -> Tensor:
    """bool [S, S] line s: what a row does not see whose last position is number s of its split; the same every step."""
    return torch.ones(split_tokens, split_tokens, dtype=torch.bool, device=device).triu_(1)
