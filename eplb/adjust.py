"""A placement made better by few changes: again and again the most loaded rank of each layer is relieved by one of

    swap    one of its copies goes to another rank, and a lighter one comes back     2 copies to fetch
    more    an expert of its gets one more copy elsewhere, in the slot of a copy     1 copy to fetch
            that is not its expert's only one

Used on a fresh packing, to finish it, and on the placement in force, to follow a drifting load. Pure; the layout of
arrays is that of `packing`.

Legend: B rows, A rows still at work, Z = E experts and "empty", R ranks, Q the lightest ranks, L local slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packing import loads_of, shares, values_of

_MOST_PARTNERS, _MOST_PAIRS = 16, 1600
"""How many of the lightest ranks are looked at, and how many pairs of slots; with many slots few partners will do."""


@dataclass(kw_only=True, slots=True)
class Bins:
    """Placements under work; changed in place."""

    weights_BZ: np.ndarray
    counts_BZ: np.ndarray
    slots_BRL: np.ndarray

    @property
    def loads_BR(self) -> np.ndarray:
        """What each rank carries."""
        return loads_of(shares(self.weights_BZ, self.counts_BZ), self.slots_BRL)

    def take(self, rows: np.ndarray) -> Bins:
        """A copy of some rows."""
        return Bins(weights_BZ=self.weights_BZ[rows], counts_BZ=self.counts_BZ[rows], slots_BRL=self.slots_BRL[rows])

    def put(self, rows: np.ndarray, other: Bins) -> None:
        """Take over `other` in these rows."""
        self.counts_BZ[rows], self.slots_BRL[rows] = other.counts_BZ, other.slots_BRL


def relieve(bins: Bins, *, target_B: np.ndarray, steps: int, thrift: float = 0.0) -> None:
    """Lower the largest load of each row to `target_B` or as far as `steps` changes go, in place.

    thrift  how much a copy to fetch counts against a change, as a part of what the change lowers; 0: not at all, 1:
            what lowers the load most per copy wins
    """
    rows = np.arange(len(bins.slots_BRL))
    work = bins.take(rows)
    for _ in range(steps if bins.slots_BRL.shape[1] > 1 else 0):
        shares_AZ = shares(work.weights_BZ, work.counts_BZ)
        values_ARL = values_of(shares_AZ, work.slots_BRL)
        loads_AR = values_ARL.sum(axis=2)
        going_A = loads_AR.max(axis=1) > target_B[rows]
        changed_A = _change(_View(work, shares_AZ, values_ARL, loads_AR), thrift) if going_A.all() else going_A
        if not changed_A.all():
            bins.put(rows, work)
            rows, work = rows[changed_A], work.take(changed_A)
        if not len(rows):
            return
    bins.put(rows, work)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Best:
    """The best change of one kind in each row: the load it leaves on the ranks it touches, and where it happens."""

    left_A: np.ndarray
    local_A: np.ndarray
    """Local slot of the heaviest rank: the copy that leaves, or the expert that gets more."""
    rank_A: np.ndarray
    other_A: np.ndarray
    """Rank and local slot on the other side."""


def _change(view: _View, thrift: float) -> np.ndarray:
    """bool [A]: rows in which one change was made because it leaves less than the largest load."""
    swap, more = view.best_swap(), view.best_more()
    gain_swap_A, gain_more_A = view.top_A1[:, 0] - swap.left_A, view.top_A1[:, 0] - more.left_A
    takes_more_A = (gain_more_A > 0) & (gain_more_A * (1.0 + thrift) >= gain_swap_A)
    takes_swap_A = ~takes_more_A & (gain_swap_A > 0)
    _make_more(view.work, view.heavy_A, more, takes_more_A)
    _make_swap(view.work, view.heavy_A, swap, takes_swap_A)
    return takes_more_A | takes_swap_A


def _make_swap(work: Bins, heavy_A: np.ndarray, swap: _Best, chosen_A: np.ndarray) -> None:
    row = np.flatnonzero(chosen_A)
    mine, theirs = (row, heavy_A[row], swap.local_A[row]), (row, swap.rank_A[row], swap.other_A[row])
    work.slots_BRL[mine], work.slots_BRL[theirs] = work.slots_BRL[theirs], work.slots_BRL[mine]


def _make_more(work: Bins, heavy_A: np.ndarray, more: _Best, chosen_A: np.ndarray) -> None:
    row = np.flatnonzero(chosen_A)
    gains = work.slots_BRL[row, heavy_A[row], more.local_A[row]]
    theirs = (row, more.rank_A[row], more.other_A[row])
    loses = work.slots_BRL[theirs]
    work.counts_BZ[row, gains] += 1
    work.counts_BZ[row, loses] -= 1
    work.slots_BRL[theirs] = gains


class _View:
    """One look at all rows: the heaviest rank of each, and how its slots stand to those of the lightest ranks."""

    def __init__(self, work: Bins, shares_AZ: np.ndarray, values_ARL: np.ndarray, loads_AR: np.ndarray) -> None:
        self.work, self.shares_AZ = work, shares_AZ
        self.row_A1 = np.arange(len(loads_AR))[:, None]
        self.order_AR = loads_AR.argsort(axis=1, kind="stable")
        self.loads_AR = loads_AR
        self.heavy_A = self.order_AR[:, -1]
        self.light_AQ = self._partners(values_ARL)
        self.top_A1 = np.take_along_axis(loads_AR, self.order_AR[:, -1:], axis=1)
        self.loads_AQ1 = np.take_along_axis(loads_AR, self.light_AQ, axis=1)[:, :, None]
        self.mine_AL = work.slots_BRL[self.row_A1[:, 0], self.heavy_A]
        self.theirs_AQL = work.slots_BRL[self.row_A1, self.light_AQ]
        self.my_shares_AL = self.shares_AZ[self.row_A1, self.mine_AL]
        self.their_shares_AQL = values_ARL[self.row_A1, self.light_AQ]
        same = self.mine_AL[:, :, None, None] == self.theirs_AQL[:, None]
        same &= (self.mine_AL != work.weights_BZ.shape[1] - 1)[:, :, None, None]
        self.held_there_ALQ1, self.held_here_AQL = same.any(axis=3)[..., None], same.any(axis=1)

    def _partners(self, values_ARL: np.ndarray) -> np.ndarray:
        """[A, Q]: the lightest ranks, and those that have the lightest copies to offer, which count where one expert
        makes a rank so heavy that only its company can change."""
        most = min(max(_MOST_PAIRS // values_ARL.shape[2] ** 2, 1), _MOST_PARTNERS)
        lightest_AR = values_ARL.min(axis=2)
        np.put_along_axis(lightest_AR, self.heavy_A[:, None], np.inf, axis=1)
        by_copy_AR = lightest_AR.argsort(axis=1, kind="stable")[:, :-1]
        few = most // 3
        return np.concatenate([self.order_AR[:, :-1][:, : most - few], by_copy_AR[:, :few]], axis=1)

    def best_swap(self) -> _Best:
        """Lowers the heaviest rank, and leaves the other below it."""
        moved = self.my_shares_AL[:, :, None, None] - self.their_shares_AQL[:, None]
        left = np.maximum(self.top_A1[:, :, None, None] - moved, self.loads_AQ1[:, None] + moved)
        return self._best(np.where(self.held_there_ALQ1 | self.held_here_AQL[:, None], np.inf, left))

    def best_more(self) -> _Best:
        """One more copy for expert b of the heaviest rank, in the slot of a copy of a.

        Ranks that hold b fall, ranks that hold a rise.
        """
        weights_AZ = self.work.weights_BZ
        count_AL = self.work.counts_BZ[self.row_A1, self.mine_AL]
        thinner_AL = np.rint(weights_AZ[self.row_A1, self.mine_AL] / (count_AL + 1))
        rise_AQL = self._rise()
        here_AL = self.top_A1 - self.my_shares_AL + thinner_AL
        there_AQL = self.loads_AQ1 - self.their_shares_AQL
        left = np.maximum(
            here_AL[:, :, None, None] + np.where(self.held_here_AQL, rise_AQL, 0.0)[:, None],
            thinner_AL[:, :, None, None] + there_AQL[:, None],
        )
        left = np.maximum(left, (self._fullest_other() + rise_AQL)[:, None])
        barred_AL = self.mine_AL == weights_AZ.shape[1] - 1
        return self._best(np.where(self.held_there_ALQ1 | barred_AL[:, :, None, None], np.inf, left))

    def _rise(self) -> np.ndarray:
        """[A, Q, L]: how much every other copy of a slot's expert rises if this one goes; infinite for the only copy,
        and for an empty slot: the number of copies stays."""
        counts_AZ = self.work.counts_BZ
        thicker_AZ = np.rint(self.work.weights_BZ / np.maximum(counts_AZ - 1, 1)) - self.shares_AZ
        return values_of(np.where(counts_AZ > 1, thicker_AZ, np.inf), self.theirs_AQL)

    def _fullest_other(self) -> np.ndarray:
        """[A, Q, L]: largest load of other ranks, but the heaviest, that hold the slot's expert; 0 without one."""
        num_rows, num_ranks, num_local = self.work.slots_BRL.shape
        num_kinds = self.work.weights_BZ.shape[1]
        base_A11 = num_kinds * self.row_A1[:, :, None]
        others_AR = self.order_AR[:, :-1]
        places = (self.work.slots_BRL[self.row_A1, others_AR] + base_A11).ravel()
        ranks = np.repeat(others_AR.ravel(), num_local)
        # Of several values for one place the last stays: that of the fullest rank.
        first = np.full(num_rows * num_kinds, -1)
        first[places] = ranks
        others = first[places] != ranks
        second = np.full(num_rows * num_kinds, -1)
        second[places[others]] = ranks[others]
        theirs_AQL = self.theirs_AQL + base_A11
        first_AQL = first[theirs_AQL]
        other_AQL = np.where(first_AQL == self.light_AQ[:, :, None], second[theirs_AQL], first_AQL)
        loads_AQL = self.loads_AR.ravel()[other_AQL + num_ranks * self.row_A1[:, :, None]]
        return np.where(other_AQL >= 0, loads_AQL, 0.0)

    def _best(self, left_ALQL: np.ndarray) -> _Best:
        num_rows, num_local, num_light, _ = left_ALQL.shape
        flat = left_ALQL.reshape(num_rows, -1)
        place_A = flat.argmin(axis=1)
        local_A, rest_A = np.divmod(place_A, num_light * num_local)
        light_A, other_A = np.divmod(rest_A, num_local)
        rows = self.row_A1[:, 0]
        return _Best(left_A=flat[rows, place_A], local_A=local_A, rank_A=self.light_AQ[rows, light_A], other_A=other_A)
