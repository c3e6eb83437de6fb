"""Which share of its tokens a rank sends to each copy of an expert: its own copy first, then its node's, then the rest.

Copies are planned to carry equal shares, so nearness may decide only as far as that stays nearly true. With each rank
sending 1/R of an expert's tokens, C copies and at most one copy on a rank, a copy's fair part 1/C is at least 1/R:

    own     a rank that holds the expert keeps all its tokens at home            costs no balance
    near    ranks of a node fill the copies of their node, up to 1.05 / C each   costs at most 5%
    far     whatever is left fills the copies that are still below 1 / C, in proportion to what they lack

Pure arithmetic on a placement; the same on every rank. Knows no tokens and no loads.

Legend: E experts, X copies of one expert, R ranks.
"""

from __future__ import annotations

import numpy as np

NEAR_LIMIT = 1.05
"""Load of a copy over the mean of its expert's copies, at most."""


def copy_shares(
    slots_EX: np.ndarray, *, rank: int, num_ranks: int, slots_per_rank: int, node_size: int = 1
) -> np.ndarray:
    """float64 [E, X]: the share of rank `rank`'s tokens for each copy of an expert; a row sums to 1.

    slots_EX   int [E, X] slots of the copies, padded with -1; every expert has one
    node_size  ranks on a node; 1 when no rank is nearer than another
    """
    copies = _Copies(slots_EX, num_ranks=num_ranks, slots_per_rank=slots_per_rank, node_size=node_size)
    own_EX = copies.ranks_EX == rank
    near_EX = copies.nodes_EX == rank // node_size
    num_own_E, has_near_E = own_EX.sum(axis=1), near_EX.any(axis=1)
    nearby_E = np.where(has_near_E, _first(near_EX, copies.near_part_EX), 0.0)
    shares_EX = nearby_E[:, None] * _parts(np.where(near_EX, copies.room_EX, 0.0))
    shares_EX += (1.0 - nearby_E)[:, None] * _parts(copies.lack_EX)
    return np.where((num_own_E > 0)[:, None], own_EX / np.maximum(num_own_E, 1)[:, None], shares_EX)


class _Copies:
    """What is known of all copies before one rank is looked at.

    room_EX       what a copy may still take from its node when its own rank is served
    near_part_EX  the part of its tokens that a rank of the copy's node, without a copy of its own, keeps on the node
    lack_EX       what a copy lacks to its fair part when its rank and its node are served
    """

    def __init__(self, slots_EX: np.ndarray, *, num_ranks: int, slots_per_rank: int, node_size: int) -> None:
        real_EX = slots_EX >= 0
        self.ranks_EX = np.where(real_EX, slots_EX // slots_per_rank, -1)
        self.nodes_EX = np.where(real_EX, self.ranks_EX // node_size, -1)
        same_rank_EXX = _same(self.ranks_EX)
        same_node_EXX = _same(self.nodes_EX)
        fair_EX = real_EX / real_EX.sum(axis=1, keepdims=True)
        on_rank_EX = np.maximum(same_rank_EXX.sum(axis=2), 1)
        own_EX = real_EX / (num_ranks * on_rank_EX)
        self.room_EX = np.where(real_EX, np.maximum(NEAR_LIMIT * fair_EX - own_EX, 0.0), 0.0)

        node_ranks_EX = np.minimum(node_size, num_ranks - self.nodes_EX * node_size)
        holders_EX = (same_node_EXX / on_rank_EX[:, None, :]).sum(axis=2)
        asked_EX = np.where(real_EX, np.maximum(node_ranks_EX - holders_EX, 0.0) / num_ranks, 0.0)
        node_room_EX = (same_node_EXX * self.room_EX[:, None, :]).sum(axis=2)
        self.near_part_EX = np.minimum(1.0, node_room_EX / np.maximum(asked_EX, 1e-300))
        taken_EX = np.minimum(asked_EX, node_room_EX) * self.room_EX / np.maximum(node_room_EX, 1e-300)
        self.lack_EX = np.where(real_EX, np.maximum(fair_EX - own_EX - taken_EX, 0.0), 0.0)


def _same(places_EX: np.ndarray) -> np.ndarray:
    """bool [E, X, X]: two copies are in the same place; padding is in none."""
    return (places_EX[:, :, None] == places_EX[:, None, :]) & (places_EX >= 0)[:, None, :]


def _first(mask_EX: np.ndarray, values_EX: np.ndarray) -> np.ndarray:
    """[E]: the value at the first place of each row where the mask is set (or at 0)."""
    return np.take_along_axis(values_EX, mask_EX.argmax(axis=1)[:, None], axis=1)[:, 0]


def _parts(weights_EX: np.ndarray) -> np.ndarray:
    """Each row divided by its sum; a row of zeros stays so."""
    total_E1 = weights_EX.sum(axis=1, keepdims=True)
    return weights_EX / np.where(total_E1 > 0, total_E1, 1.0)
