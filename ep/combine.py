"""The two ways back: what the expert ranks return, and how the source adds it up. Pure; the exchange carries it.

Sums are in the wide dtype, one product and one addition at a time in a fixed order, so they repeat bit for bit. (On a
CPU index_add_ adds in index order.)

Legend: T tokens here, D model, K top-k, R ranks, N rows, M (row, slot) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .layout import LocalPairs, SendLayout, pair_order, pair_splits

CombineMode = Literal["ranks", "slots"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums, weights, router and norms are computed in: float64 for a float64 run, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def sum_rows(rows_MD: Tensor, targets_M: Tensor, num_targets: int) -> Tensor:
    """[num_targets, D] in rows' dtype: target n gets its rows added to zero in the order of M."""
    total_ND = torch.zeros(num_targets, rows_MD.shape[1], dtype=rows_MD.dtype, device=rows_MD.device)
    return total_ND.index_add_(0, targets_M, rows_MD)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What one rank sent in a dispatch, and got: kept for the way back."""

    layout: SendLayout
    slots_TK: Tensor
    weights_TK: Tensor
    recv_splits: tuple[int, ...]  # R: rows that came from each rank
    send_pairs: Sequence[int]  # R: pairs that each rank computes for this one; what count_pairs said
    recv_pairs: tuple[int, ...]  # R: pairs that this rank computes for each


class Combine(Protocol):
    """One way back. Splits are those of the returning all_to_all."""

    def __init__(self, *, num_ranks: int, slots_per_rank: int) -> None: ...

    def rows_per_token(self, top_k: int) -> int:
        """Most rows that come back for one token."""
        ...

    def count_pairs(self, slots_TK: Tensor, /) -> Sequence[int]:
        """R: rows to expect from each rank that dispatch's splits do not tell; zeros where they do."""
        ...

    def splits(self, sent: Sent) -> tuple[Sequence[int], Sequence[int]]:
        """(rows that come back here, rows that this rank returns), R each."""
        ...

    def give_back(self, y_MD: Tensor, pairs: LocalPairs, num_rows: int, /) -> Tensor:
        """The rows that this rank returns, in the dtype of y."""
        ...

    def take_back(self, rows_ND: Tensor, sent: Sent) -> Tensor:
        """[T, D] in the wide dtype from the rows that came back."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksCombine:
    """One row per (token, rank): the expert rank weighs and adds in top-k order, the source adds in rank order."""

    num_ranks: int
    slots_per_rank: int

    def rows_per_token(self, top_k: int) -> int:
        return min(top_k, self.num_ranks)

    def count_pairs(self, _slots_TK: Tensor, /) -> Sequence[int]:
        return (0,) * self.num_ranks

    def splits(self, sent: Sent) -> tuple[Sequence[int], Sequence[int]]:
        return sent.layout.splits, sent.recv_splits

    def give_back(self, y_MD: Tensor, pairs: LocalPairs, num_rows: int, /) -> Tensor:
        return sum_rows(y_MD * pairs.weights_M.unsqueeze(1), pairs.rows_M, num_rows).to(y_MD.dtype)

    def take_back(self, rows_ND: Tensor, sent: Sent) -> Tensor:
        return sum_rows(rows_ND.to(sent.weights_TK.dtype), sent.layout.tokens_N, sent.slots_TK.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsCombine:
    """One row per (token, slot): the source weighs and adds in top-k order, wherever the slots are."""

    num_ranks: int
    slots_per_rank: int

    def rows_per_token(self, top_k: int) -> int:
        return top_k

    def count_pairs(self, slots_TK: Tensor, /) -> Sequence[int]:
        return pair_splits(slots_TK, slots_per_rank=self.slots_per_rank, num_ranks=self.num_ranks)

    def splits(self, sent: Sent) -> tuple[Sequence[int], Sequence[int]]:
        return sent.send_pairs, sent.recv_pairs

    def give_back(self, y_MD: Tensor, _pairs: LocalPairs, _num_rows: int, /) -> Tensor:
        return y_MD.contiguous()

    def take_back(self, rows_ND: Tensor, sent: Sent) -> Tensor:
        pairs = pair_order(sent.slots_TK, sent.weights_TK, slots_per_rank=self.slots_per_rank)
        weighted_MD = rows_ND.index_select(0, pairs.arrived_M) * pairs.weights_M.unsqueeze(1)
        return sum_rows(weighted_MD, pairs.tokens_M, sent.slots_TK.shape[0])


COMBINES: dict[CombineMode, type[Combine]] = {"ranks": RanksCombine, "slots": SlotsCombine}
