"""Where rows go: pure index math between tokens, ranks and slots. No ranks talk here and no row is touched.

Slot s lives on rank s // slots_per_rank; slot -1 is no expert and goes nowhere. A token goes once to each rank.

Legend: T tokens here, K top-k, R ranks, N rows, M (row, slot) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SendLayout:
    """The rows that leave, in destination order, ascending token within a destination."""

    tokens_N: Tensor  # int64: the token of each row
    splits: list[int]  # R: rows to each rank


@dataclass(frozen=True, slots=True, eq=False)
class LocalPairs:
    """What arrived for this rank's slots, in (row, top-k) order."""

    rows_M: Tensor  # int64
    slots_M: Tensor  # int64: 0 .. slots_per_rank - 1
    weights_M: Tensor


def ranks_of(slots_TK: Tensor, slots_per_rank: int) -> Tensor:
    """The rank of each slot, -1 for slot -1. int64 [T, K]."""
    return torch.floor_divide(slots_TK, slots_per_rank)


def send_layout(slots_TK: Tensor, *, slots_per_rank: int, num_ranks: int) -> SendLayout:
    """Who gets which token.

    slots = [[0, 3], [2, 3], [-1, 1]], 2 slots a rank     ranks = [[0, 1], [1, 1], [-1, 0]]
    -> tokens = [0, 2, 0, 1], splits = [2, 2]             token 1 goes to rank 1 once
    """
    goes_TR = torch.zeros(slots_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=slots_TK.device)
    goes_TR.scatter_(1, ranks_of(slots_TK, slots_per_rank) + 1, True)  # column 0 takes the -1s
    goes_RT = goes_TR.narrow(1, 1, num_ranks).t()
    return SendLayout(tokens_N=goes_RT.nonzero().select(1, 1), splits=goes_RT.sum(1).tolist())


def pair_splits(slots_TK: Tensor, *, slots_per_rank: int, num_ranks: int) -> list[int]:
    """R: how many (token, slot) pairs each rank computes for these tokens."""
    ranks = ranks_of(slots_TK, slots_per_rank).flatten() + 1
    return torch.bincount(ranks, minlength=num_ranks + 1)[1:].tolist()


def local_pairs(slots_NK: Tensor, weights_NK: Tensor, *, rank: int, slots_per_rank: int) -> LocalPairs:
    """The pairs of arrived rows that are meant for `rank`.

    slots = [[0, 3], [3, 2]], rank 1 of 2 slots           rows = [0, 1, 1], slots = [1, 1, 0]
    """
    here_M = (ranks_of(slots_NK, slots_per_rank) == rank).flatten().nonzero().squeeze(1)
    return LocalPairs(
        rows_M=torch.floor_divide(here_M, slots_NK.shape[1]),
        slots_M=slots_NK.take(here_M) - rank * slots_per_rank,
        weights_M=weights_NK.take(here_M),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PairOrder:
    """The pairs of these tokens in (token, top-k) order, and the places of the rows that came back for them."""

    tokens_M: Tensor  # int64
    weights_M: Tensor
    arrived_M: Tensor  # int64: pair m is row arrived_M[m] of what came back in (rank, token, top-k) order


def pair_order(slots_TK: Tensor, weights_TK: Tensor, *, slots_per_rank: int) -> PairOrder:
    """Undo the detour over the ranks.

    slots = [[3, 0], [1, -1]], 2 slots a rank             pairs (0,3) (0,0) (1,1) are on ranks 1, 0, 0
    came back: (0,0) (1,1) (0,3)                          -> arrived = [2, 0, 1]
    """
    valid_M = (slots_TK >= 0).flatten().nonzero().squeeze(1)
    order_M = ranks_of(slots_TK.take(valid_M), slots_per_rank).argsort(stable=True)
    arrived_M = torch.empty_like(order_M)
    arrived_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    return PairOrder(
        tokens_M=torch.floor_divide(valid_M, slots_TK.shape[1]),
        weights_M=weights_TK.take(valid_M),
        arrived_M=arrived_M,
    )
