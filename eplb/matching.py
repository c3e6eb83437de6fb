"""A new placement written so that as little as possible has to move: bins to ranks they resemble, experts to slots.

Which bin of copies a policy calls rank 0 says nothing; it goes to the rank that holds most of it already. Pure; the
layout of arrays is that of `packing`, an empty slot holds expert number E.

Legend: B rows, R ranks, L local slots of a rank, Z = E experts and "empty".
"""

from __future__ import annotations

import numpy as np

_SWAPS = 32


def relabel(new_BRL: np.ndarray, old_BRL: np.ndarray, *, num_experts: int, num_nodes: int = 1) -> np.ndarray:
    """int64 [B, R, L]: the bins of `new_BRL` on the ranks, and their experts in the slots, where most can stay.

    Ranks come in `num_nodes` nodes of equal size, and the bins of a node stay together.
    """
    num_rows, num_ranks, num_local = new_BRL.shape
    if num_nodes > 1:
        by_node = (num_rows, num_nodes, num_ranks // num_nodes * num_local)
        order = match(new_BRL.reshape(by_node), old_BRL.reshape(by_node), num_experts=num_experts)
        nodes = new_BRL.reshape(num_rows, num_nodes, -1)
        new_BRL = np.take_along_axis(nodes, order[:, :, None], axis=1).reshape(new_BRL.shape)
    inside = (num_rows * num_nodes, num_ranks // num_nodes, num_local)
    new, old = new_BRL.reshape(inside), old_BRL.reshape(inside)
    order = match(new, old, num_experts=num_experts)
    new = np.take_along_axis(new, order[:, :, None], axis=1)
    return keep_slots(new, old, num_experts=num_experts).reshape(num_rows, num_ranks, num_local)


def match(new_BRL: np.ndarray, old_BRL: np.ndarray, *, num_experts: int) -> np.ndarray:
    """int64 [B, R]: new bin for each old rank, greedy by experts in common; then two bins swap while that helps."""
    num_rows, num_ranks, num_local = new_BRL.shape
    common = np.take_along_axis(_held(old_BRL, num_experts), new_BRL.reshape(num_rows, 1, -1), axis=2)
    common_BRR = common.reshape(num_rows, num_ranks, num_ranks, num_local).sum(axis=3, dtype=np.int16)
    rows, order_BR = np.arange(num_rows), np.empty((num_rows, num_ranks), np.int64)
    left = common_BRR.copy()
    for _ in range(num_ranks):
        rank_B, bin_B = np.divmod(left.reshape(num_rows, -1).argmax(axis=1), num_ranks)
        order_BR[rows, rank_B] = bin_B
        left[rows, rank_B, :] = -1
        left[rows, :, bin_B] = -1
    for _ in range(_SWAPS):
        if not _swap_best(common_BRR, order_BR):
            break
    return order_BR


def _swap_best(common_BRR: np.ndarray, order_BR: np.ndarray) -> bool:
    """Swap, in each row, the two bins whose swap keeps most in place; False when none helps."""
    num_rows, num_ranks = order_BR.shape
    rows = np.arange(num_rows)
    with_BRR = np.take_along_axis(common_BRR, np.broadcast_to(order_BR[:, None, :], common_BRR.shape), axis=2)
    now_BR = np.diagonal(with_BRR, axis1=1, axis2=2)
    gain_BRR = with_BRR + with_BRR.transpose(0, 2, 1) - now_BR[:, :, None] - now_BR[:, None, :]
    flat = gain_BRR.reshape(num_rows, -1)
    best_B = flat.argmax(axis=1)
    row = np.flatnonzero(flat[rows, best_B] > 0)
    one, two = np.divmod(best_B[row], num_ranks)
    order_BR[row, one], order_BR[row, two] = order_BR[row, two], order_BR[row, one]
    return len(row) > 0


def _held(slots_BRL: np.ndarray, num_experts: int) -> np.ndarray:
    """int8 [B, R, Z]: 1 where a rank holds an expert; "empty" counts for nothing."""
    num_rows, num_ranks, _ = slots_BRL.shape
    held = np.zeros((num_rows, num_ranks, num_experts + 1), np.int8)
    np.put_along_axis(held, slots_BRL, 1, axis=2)
    held[:, :, -1] = 0
    return held


def keep_slots(new_BRL: np.ndarray, old_BRL: np.ndarray, *, num_experts: int) -> np.ndarray:
    """The experts of `new_BRL` on the same ranks; those that were there stay in their slots, others fill the rest.

    old (4 7 1 .), new (1 9 4 3) -> (4 9 1 3)
    """
    same = (old_BRL[..., :, None] == new_BRL[..., None, :]) & (old_BRL != num_experts)[..., :, None]
    # An old rank may hold an expert twice: the first of them stays.
    stays_BRL = same.any(axis=3) & ~_repeats(old_BRL)
    comes_BRL = ~same.any(axis=2)
    free = stays_BRL.argsort(axis=2, kind="stable")
    coming = (~comes_BRL).argsort(axis=2, kind="stable")
    num_coming = comes_BRL.sum(axis=2, keepdims=True)
    filled = np.take_along_axis(new_BRL, coming, axis=2)
    is_free = np.arange(new_BRL.shape[2]) < num_coming
    kept = np.take_along_axis(old_BRL, free, axis=2)
    out = np.empty_like(new_BRL)
    np.put_along_axis(out, free, np.where(is_free, filled, kept), axis=2)
    return out


def _repeats(slots_BRL: np.ndarray) -> np.ndarray:
    """bool [B, R, L]: an earlier slot of the same rank holds the same."""
    same = slots_BRL[..., :, None] == slots_BRL[..., None, :]
    return np.tril(same, k=-1).any(axis=3)
