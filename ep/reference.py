"""Dispatch and combine without ranks: loops and a dense sum in float64. What the exchange is held against.

Legend: T tokens, D model, K top-k, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Expert = Callable[[Tensor, Tensor], Tensor]
"""expert(x_ND, slots_N) -> y_ND: what slot slots_N[n] makes of row n, in x's dtype, each row by itself."""


def dense_combine(x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, expert: Expert) -> Tensor:
    """[T, D] float64: sum over k of weights[t, k] * expert(x[t], slots[t, k]), slots of -1 left out."""
    total_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for slots_T, weights_T in zip(slots_TK.unbind(1), weights_TK.unbind(1), strict=True):
        used = slots_T >= 0
        y = expert(x_TD[used], slots_T[used]).double()
        total_TD[used] += weights_T[used].double()[:, None] * y
    return total_TD


def loop_send_tokens(slots_TK: Tensor, *, slots_per_rank: int, num_ranks: int) -> list[list[int]]:
    """For each rank the tokens that it gets: `layout.send_layout` as two loops."""
    tokens: list[list[int]] = [[] for _ in range(num_ranks)]
    for token, slots in enumerate(slots_TK.tolist()):
        for rank in sorted({slot // slots_per_rank for slot in slots if slot >= 0}):
            tokens[rank].append(token)
    return tokens


def loop_pairs(slots_TK: Tensor, *, slots_per_rank: int, num_ranks: int) -> list[list[tuple[int, int]]]:
    """For each rank the (token, k) that it computes, in that order."""
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for token, slots in enumerate(slots_TK.tolist()):
        for k, slot in enumerate(slots):
            if slot >= 0:
                pairs[slot // slots_per_rank].append((token, k))
    return pairs
