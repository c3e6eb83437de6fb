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
    rows_TJ: Tensor  # int64: the rows of each token in ascending order, then -1; J = min(K, R)


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
       rows = [[0, 2], [3, -1], [1, -1]]
    """
    goes_TR = torch.zeros(slots_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=slots_TK.device)
    goes_TR.scatter_(1, ranks_of(slots_TK, slots_per_rank) + 1, True)  # column 0 takes the -1s
    goes_RT = goes_TR.narrow(1, 1, num_ranks).t()
    row_RT = (goes_RT.flatten().cumsum(0) - 1).view(goes_RT.shape)
    return SendLayout(
        tokens_N=goes_RT.nonzero().select(1, 1),
        splits=goes_RT.sum(1).tolist(),
        rows_TJ=by_row(row_RT.t(), goes_RT.t(), most=min(slots_TK.shape[1], num_ranks)),
    )


def by_row(values_TR: Tensor, wanted_TR: Tensor, *, most: int) -> Tensor:
    """[T, most] the wanted values of each row in their order, then -1.

    values = [[5, 6, 7]], wanted = [[True, False, True]], most 3      -> [[5, 7, -1]]
    """
    column_TR = (wanted_TR.cumsum(1) - 1).where(wanted_TR, most)  # one more column takes the rest
    found = torch.full((values_TR.shape[0], most + 1), -1, dtype=values_TR.dtype, device=values_TR.device)
    return found.scatter_(1, column_TR, values_TR)[:, :most]


def pair_splits(slots_TK: Tensor, *, slots_per_rank: int, num_ranks: int) -> list[int]:
    """R: how many (token, slot) pairs each rank computes for these tokens."""
    ranks = ranks_of(slots_TK, slots_per_rank).flatten() + 1
    return torch.bincount(ranks, minlength=num_ranks + 1)[1:].tolist()


def own_slots(slots_NK: Tensor, *, member: int, slots_per_member: int) -> Tensor:
    """Slots counted from the first one of `member`, -1 for those of others and for none.

    slots = [[0, 3], [3, 2]], member 1 of 2 slots          -> [[-1, 1], [1, 0]]
    """
    first = member * slots_per_member
    own_NK = slots_NK - first
    return own_NK.masked_fill_((own_NK < 0) | (own_NK >= slots_per_member), -1)


def local_pairs(slots_NK: Tensor, weights_NK: Tensor) -> LocalPairs:
    """The pairs of arrived rows, by slots of this rank (-1 none).

    slots = [[-1, 1], [1, 0]]                              rows = [0, 1, 1], slots = [1, 1, 0]
    """
    here_M = (slots_NK >= 0).flatten().nonzero().squeeze(1)
    return LocalPairs(
        rows_M=torch.floor_divide(here_M, slots_NK.shape[1]),
        slots_M=slots_NK.take(here_M),
        weights_M=weights_NK.take(here_M),
    )


def pair_order(slots_TK: Tensor, *, slots_per_rank: int) -> Tensor:
    """int64 [T, K]: where the row of each pair is among those that came back in (rank, token, top-k) order; -1 none.

    slots = [[3, 0], [1, -1]], 2 slots a rank             pairs (0,3) (0,0) (1,1) are on ranks 1, 0, 0
    came back: (0,0) (1,1) (0,3)                          -> [[2, 0], [1, -1]]
    """
    valid_M = (slots_TK >= 0).flatten().nonzero().squeeze(1)
    order_M = ranks_of(slots_TK.take(valid_M), slots_per_rank).argsort(stable=True)
    arrived = torch.full((slots_TK.numel(),), -1, device=slots_TK.device)
    arrived[valid_M[order_M]] = torch.arange(order_M.shape[0], device=order_M.device)
    return arrived.view(slots_TK.shape)
