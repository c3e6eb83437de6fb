"""Copies of experts put into the slots of ranks, for many layers at once: how many copies, a first packing, levelling.

Knows numbers only: rows are independent problems (layers, or nodes of layers). An empty slot holds expert number E,
whose weight is 0. All sums are of whole numbers below 2**53 in float64, and everything else is single IEEE operations,
so any machine finds the same packing for the same loads, if these are whole numbers too.

Legend: B rows, E experts, Z = E + 1 experts and "empty", P copies in all, R ranks, L local slots of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

UNIT = float(1 << 40)
"""What the weights of a row add up to, about: sums of up to 8,192 copies stay exact."""

_EXCHANGED = 4
_PAIRS = 8
_PATIENCE = 3

Greed = Literal["largest", "saving"]
"""Who gets the next copy. largest: the expert with the largest share w / c, which makes the largest share as small as
it can be. saving: the one whose share shrinks most, w / c - w / (c + 1), which makes all shares together as small as
they can be; better where a rank has few slots, so that large shares must pair up."""


def whole_weights(loads_BE: np.ndarray) -> np.ndarray:
    """float64 [B, Z] of whole numbers, each row about UNIT in all; the last column, "empty", is 0."""
    total_B1 = loads_BE.sum(axis=1, keepdims=True, dtype=np.float64)
    weights_BE = np.rint(loads_BE / np.where(total_B1 > 0, total_B1, 1.0) * UNIT)
    return np.concatenate([weights_BE, np.zeros((len(loads_BE), 1))], axis=1)


def replicate(weights_BZ: np.ndarray, extra_B: np.ndarray, *, most: int, greed: Greed) -> np.ndarray:
    """int64 [B, Z] copies of each expert: one, and `extra_B` more in a row handed out one by one, at most `most` each.

    The first expert wins a tie. The last column, "empty", is 0 (see `unpack`).
    """
    rows = np.arange(len(weights_BZ))
    counts_BZ = np.ones(weights_BZ.shape, np.int64)
    keys_BZ = _keys(weights_BZ, counts_BZ, greed)
    keys_BZ[:, -1] = -1.0
    if most <= 1:
        keys_BZ[:] = -1.0
    for step in range(int(extra_B.max(initial=0))):
        asking = rows if step < extra_B.min() else rows[extra_B > step]
        chosen = keys_BZ[asking].argmax(axis=1) if len(asking) < len(rows) else keys_BZ.argmax(axis=1)
        count = counts_BZ[asking, chosen] + 1
        counts_BZ[asking, chosen] = count
        keys_BZ[asking, chosen] = np.where(count < most, _keys(weights_BZ[asking, chosen], count, greed), -1.0)
    counts_BZ[:, -1] = 0
    return counts_BZ


def exchanges(weights_BZ: np.ndarray, counts_BZ: np.ndarray, *, most: int) -> Iterator[np.ndarray]:
    """Other copy counts [B, Z]: one of the copies that matter least goes to one of the experts that wait for one.

    A row that has no such copy, or no such expert, stays as it is.
    """
    rows = np.arange(len(weights_BZ))
    least = np.where(counts_BZ > 1, weights_BZ / np.maximum(counts_BZ - 1, 1), np.inf)
    waits = np.where((counts_BZ > 0) & (counts_BZ < most), weights_BZ / np.maximum(counts_BZ, 1), -1.0)
    losers, winners = least.argsort(axis=1, kind="stable"), (-waits).argsort(axis=1, kind="stable")
    for loses in range(_EXCHANGED):
        for wins in range(_EXCHANGED):
            loser, winner = losers[:, loses % losers.shape[1]], winners[:, wins % winners.shape[1]]
            able = np.isfinite(least[rows, loser]) & (waits[rows, winner] >= 0) & (loser != winner)
            counts = counts_BZ.copy()
            counts[rows[able], loser[able]] -= 1
            counts[rows[able], winner[able]] += 1
            yield counts


def _keys(weights: np.ndarray, counts: np.ndarray, greed: Greed) -> np.ndarray:
    return weights / counts if greed == "largest" else weights / (counts * (counts + 1))


def shares(weights_BZ: np.ndarray, counts_BZ: np.ndarray) -> np.ndarray:
    """float64 [B, Z] whole numbers: what one copy carries."""
    return np.rint(weights_BZ / np.maximum(counts_BZ, 1))


def loads_of(shares_BZ: np.ndarray, slots_BRL: np.ndarray) -> np.ndarray:
    """float64 [B, R]: what each rank carries."""
    return values_of(shares_BZ, slots_BRL).sum(axis=2)


def values_of(shares_BZ: np.ndarray, slots_BRL: np.ndarray) -> np.ndarray:
    """float64 [B, R, L]: what each slot carries."""
    return np.take_along_axis(shares_BZ, slots_BRL.reshape(len(slots_BRL), -1), axis=1).reshape(slots_BRL.shape)


def pack(shares_BZ: np.ndarray, counts_BZ: np.ndarray, *, num_ranks: int, slots_per_rank: int) -> np.ndarray:
    """int64 [B, R, L] slots: copies by falling share, each to the least loaded rank with room that lacks the expert.

    Where no such rank is left, the copy goes to a rank with room and `part_twins` mends it: no rank ends up with two
    copies of an expert. Counts are at most `num_ranks` each and R x L in all.
    """
    items_BP = _unpack(shares_BZ, counts_BZ)
    num_rows, empty = len(items_BP), shares_BZ.shape[1] - 1
    rows = np.arange(num_rows)
    values_BP = np.take_along_axis(shares_BZ, items_BP, axis=1)
    slots_BRL = np.full((num_rows, num_ranks, slots_per_rank), empty)
    filled_BR = np.zeros((num_rows, num_ranks), np.int64)
    open_BR = np.zeros((num_rows, num_ranks))  # the load; infinite for a full rank
    last_BR = np.full((num_rows, num_ranks), empty)
    for place in range(items_BP.shape[1]):
        item_B, value_B = items_BP[:, place], values_BP[:, place]
        # Copies of one expert come one after the other: a rank has one if and only if it was the last it got.
        free_BR = np.where(last_BR == item_B[:, None], np.inf, open_BR)
        rank_B = free_BR.argmin(axis=1)
        stuck_B = np.isinf(free_BR[rows, rank_B])
        if stuck_B.any():
            rank_B = np.where(stuck_B, open_BR.argmin(axis=1), rank_B)
        real_B = item_B != empty
        at = (rows, rank_B) if real_B.all() else (rows[real_B], rank_B[real_B])
        slots_BRL[at[0], at[1], filled_BR[at]] = item_B[at[0]]
        filled_BR[at] += 1
        open_BR[at] = np.where(filled_BR[at] < slots_per_rank, open_BR[at] + value_B[at[0]], np.inf)
        last_BR[at] = item_B[at[0]]
    part_twins(shares_BZ, slots_BRL)
    return slots_BRL


def _unpack(shares_BZ: np.ndarray, counts_BZ: np.ndarray) -> np.ndarray:
    """int64 [B, P] the copies of each row by falling share, copies of one expert together; "empty" fills up to P."""
    num_rows, num_kinds = counts_BZ.shape
    totals_B = counts_BZ.sum(axis=1)
    padded_BZ = counts_BZ.copy()
    padded_BZ[:, -1] = totals_B.max() - totals_B
    items_BP = np.repeat(np.tile(np.arange(num_kinds), num_rows), padded_BZ.ravel()).reshape(num_rows, -1)
    keys_BP = -np.take_along_axis(shares_BZ, items_BP, axis=1)
    keys_BP[items_BP == num_kinds - 1] = np.inf
    return np.take_along_axis(items_BP, keys_BP.argsort(axis=1, kind="stable"), axis=1)


def part_twins(shares_BZ: np.ndarray, slots_BRL: np.ndarray) -> None:
    """Swap copies, in place, until no rank holds two of one expert. Counts are at most R each."""
    empty = shares_BZ.shape[1] - 1
    sorted_BRL = np.sort(slots_BRL, axis=2)
    twins_BR = ((sorted_BRL[:, :, 1:] == sorted_BRL[:, :, :-1]) & (sorted_BRL[:, :, 1:] != empty)).any(axis=2)
    for row in np.flatnonzero(twins_BR.any(axis=1)):
        _part_twins_of_row(shares_BZ[row], slots_BRL[row], empty)


def _part_twins_of_row(shares_Z: np.ndarray, slots_RL: np.ndarray, empty: int) -> None:
    while True:
        twin = _find_twin(slots_RL, empty)
        if twin is None:
            return
        rank, local = twin
        expert, own = slots_RL[rank, local], set(slots_RL[rank].tolist()) - {empty}
        loads_R = shares_Z[slots_RL].sum(axis=1)
        swaps = [
            (
                abs(loads_R[rank] - loads_R[other] - 2 * (shares_Z[expert] - shares_Z[slots_RL[other, place]])),
                other,
                place,
            )
            for other in range(len(slots_RL))
            if expert not in slots_RL[other]
            for place in range(slots_RL.shape[1])
            if int(slots_RL[other, place]) not in own
        ]
        assert swaps, f"expert {expert} has more copies than ranks"
        _, other, place = min(swaps)
        slots_RL[rank, local], slots_RL[other, place] = slots_RL[other, place], expert


def _find_twin(slots_RL: np.ndarray, empty: int) -> tuple[int, int] | None:
    for rank, held in enumerate(slots_RL.tolist()):
        for local, expert in enumerate(held):
            if expert != empty and expert in held[:local]:
                return rank, local
    return None


def level(shares_BZ: np.ndarray, slots_BRL: np.ndarray, *, target_B: np.ndarray, rounds: int) -> None:
    """Lower the largest load of every row in place: in a round each heavy rank swaps one copy with a light one.

    The heaviest meets the lightest, the next the next, and so on; when the largest load did not fall, other pairs meet.
    A rank at or below `target_B` is not relieved, and a row whose largest load no longer falls is left alone. Never
    raises a largest load, never puts two copies of an expert on one rank.
    """
    half = min(slots_BRL.shape[1] // 2, _PAIRS)
    active = np.arange(len(slots_BRL))
    least_B, idle_B = np.full(len(slots_BRL), np.inf), np.zeros(len(slots_BRL), np.int64)
    for _ in range(rounds if half else 0):
        loads_AR = loads_of(shares_BZ[active], slots_BRL[active])
        top_A = loads_AR.max(axis=1)
        idle_B[active] = np.where(top_A < least_B[active], 0, idle_B[active] + 1)
        least_B[active] = top_A
        going_A = (idle_B[active] <= _PATIENCE) & (top_A > target_B[active])
        active, loads_AR = active[going_A], loads_AR[going_A]
        if not len(active):
            return
        order_AR = (-loads_AR).argsort(axis=1, kind="stable")
        turn_AH = (np.arange(half) + idle_B[active][:, None]) % half
        light_AH = np.take_along_axis(order_AR[:, ::-1], turn_AH, axis=1)
        _swap_pairs(shares_BZ, slots_BRL, active, loads_AR, order_AR[:, :half], light_AH, target_B[active])


def _swap_pairs(
    shares_BZ: np.ndarray,
    slots_BRL: np.ndarray,
    active: np.ndarray,
    loads_AR: np.ndarray,
    heavy_AH: np.ndarray,
    light_AH: np.ndarray,
    target_A: np.ndarray,
) -> None:
    """Each pair of ranks swaps the two copies that level it best, if any do; in place."""
    row_A1, empty = active[:, None], shares_BZ.shape[1] - 1
    give_AHL, take_AHL = slots_BRL[row_A1, heavy_AH], slots_BRL[row_A1, light_AH]
    load_AH = np.take_along_axis(loads_AR, heavy_AH, axis=1)
    gap_AH = load_AH - np.take_along_axis(loads_AR, light_AH, axis=1)
    moved = values_of(shares_BZ[active], give_AHL)[..., :, None] - values_of(shares_BZ[active], take_AHL)[..., None, :]
    same = (give_AHL[..., :, None] == take_AHL[..., None, :]) & (give_AHL != empty)[..., :, None]
    # After the swap the pair differs by |gap - 2 moved|, which must be less than before.
    after = np.abs(gap_AH[..., None, None] - 2.0 * moved)
    after[same.any(axis=3)] = np.inf
    after[np.broadcast_to(same.any(axis=2)[..., None, :], after.shape)] = np.inf
    flat = after.reshape(*gap_AH.shape, -1)
    best_AH = flat.argmin(axis=2)
    helps_AH = np.take_along_axis(flat, best_AH[..., None], axis=2)[..., 0] < gap_AH
    helps_AH &= load_AH > target_A[:, None]
    at_A, at_H = np.nonzero(helps_AH)
    give, take = np.divmod(best_AH[at_A, at_H], slots_BRL.shape[2])
    rows, heavy, light = active[at_A], heavy_AH[at_A, at_H], light_AH[at_A, at_H]
    slots_BRL[rows, heavy, give], slots_BRL[rows, light, take] = (
        slots_BRL[rows, light, take],
        slots_BRL[rows, heavy, give],
    )
