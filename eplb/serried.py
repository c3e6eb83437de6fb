"""Policy "serried": level in expectation, never two copies of an expert on a rank, and few moves from what is in force.

    fresh   copies by falling share, packed and levelled; where ranks stay uneven, once more with other copy counts
    kept    the placement in force, changed copy by copy until it is nearly as level as the fresh one
    taken   kept where it came that far, else fresh with its bins on the ranks that they resemble

Levelness is the expected maximum over ranks, the noise of a step of the given size included. With groups of experts
that can be dealt to nodes, an expert's copies stay on its group's node; where its ranks are too few to hold one each,
groups are not looked at. Pure and the same on every machine (see `packing`).

Legend: Y layers, B rows (layers, or nodes of layers), E experts, Z = E + 1, R ranks, L local slots, S slots of all
ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .adjust import Bins, relieve
from .matching import keep_slots, relabel
from .nodes import deal_as_held, deal_groups, held_by_nodes
from .noise import expected_maximum, step_moments
from .packing import exchanges, level, pack, replicate, shares, values_of, whole_weights
from .problem import Problem

_ROUNDS, _STEPS, _FEW_STEPS = 20, 16, 8
_LEVEL = 1.00002
"""Largest load over the mean that needs no more work."""
_UNEVEN = 1.01
"""From here on other copy counts are tried."""
_FEW_COPIES = 96
"""Up to here single exchanges of copies are tried too: with few copies each matters, and trying is cheap."""
_SLACK = 1.005
"""How much more than the fresh placement's largest load the kept one may have."""
_THRIFT = 1.0


def serried(loads_YE: np.ndarray, problem: Problem, old_YS: np.ndarray | None) -> np.ndarray:
    """A `Policy`."""
    problem = _solvable(problem)
    weights_YZ = whole_weights(loads_YE)
    fresh = _fresh(weights_YZ, problem)
    if old_YS is None:
        return _bare(fresh, problem)
    shape = (len(loads_YE), problem.num_ranks, problem.slots_per_rank)
    old_YRL = np.where(old_YS < 0, problem.num_experts, old_YS).reshape(shape)
    worst_Y = expected(weights_YZ, fresh, problem)
    taken_YRL = fresh
    usable = np.flatnonzero(_usable(old_YRL, problem))
    if len(usable):
        target_Y = _SLACK * _largest(weights_YZ, fresh)[usable]
        kept = _kept(weights_YZ[usable], old_YRL[usable], target_Y, problem)
        near = expected(weights_YZ[usable], kept, problem) <= _SLACK * worst_Y[usable]
        kept = keep_slots(kept, old_YRL[usable], num_experts=problem.num_experts)
        taken_YRL[usable[near]] = kept[near]
        new = np.setdiff1d(np.arange(len(loads_YE)), usable[near])
    else:
        new = np.arange(len(loads_YE))
    if len(new):
        taken_YRL[new] = relabel(fresh[new], old_YRL[new], num_experts=problem.num_experts, num_nodes=problem.num_nodes)
    return _bare(taken_YRL, problem)


def _solvable(problem: Problem) -> Problem:
    """Without groups, if a node had to hold more copies than its ranks can without two of one expert on a rank."""
    nodes = problem.num_nodes
    most = problem.num_experts // nodes * (problem.num_ranks // nodes - 1)
    fullest = -(-(problem.num_copies - problem.num_experts) // nodes)
    return replace(problem, groups=1) if fullest > most and nodes > 1 else problem


def expected(weights_YZ: np.ndarray, slots_YRL: np.ndarray, problem: Problem) -> np.ndarray:
    """float64 [Y]: expected load of the fullest rank in a step, where 1 is the mean; 1 for a layer without load."""
    values_YRL = _values(weights_YZ, slots_YRL)
    total_Y = values_YRL.sum(axis=(1, 2))
    parts_YRL = values_YRL / np.where(total_Y > 0, total_Y, 1.0)[:, None, None]
    tokens = problem.tokens_per_rank * problem.num_ranks
    if tokens <= 0:
        largest_Y = values_YRL.sum(axis=2).max(axis=1) / np.where(total_Y > 0, total_Y, 1.0)
    else:
        largest_Y = expected_maximum(*step_moments(parts_YRL, top_k=problem.top_k, tokens=tokens))
        largest_Y = largest_Y / (tokens * problem.top_k)
    return np.where(total_Y > 0, largest_Y * problem.num_ranks, 1.0)


def _values(weights_YZ: np.ndarray, slots_YRL: np.ndarray) -> np.ndarray:
    return values_of(shares(weights_YZ, _counts(slots_YRL, weights_YZ.shape[1])), slots_YRL)


def _largest(weights_YZ: np.ndarray, slots_YRL: np.ndarray) -> np.ndarray:
    return _values(weights_YZ, slots_YRL).sum(axis=2).max(axis=1)


def _counts(slots_BRL: np.ndarray, num_kinds: int) -> np.ndarray:
    """int64 [B, Z] slots of each expert; 0 for "empty"."""
    num_rows = len(slots_BRL)
    flat = slots_BRL.reshape(num_rows, -1) + num_kinds * np.arange(num_rows)[:, None]
    counts = np.bincount(flat.ravel(), minlength=num_rows * num_kinds).reshape(num_rows, num_kinds)
    counts[:, -1] = 0
    return counts


def _bare(slots_YRL: np.ndarray, problem: Problem) -> np.ndarray:
    slots_YS = slots_YRL.reshape(len(slots_YRL), -1)
    return np.where(slots_YS == problem.num_experts, -1, slots_YS)


def _usable(old_YRL: np.ndarray, problem: Problem) -> np.ndarray:
    """bool [Y]: layers whose placement in force keeps the rules, so that it can be changed step by step."""
    counts_YE = _counts(old_YRL, problem.num_experts + 1)[:, :-1]
    ordered = np.sort(old_YRL, axis=2)
    twins = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != problem.num_experts)
    fits_Y = (counts_YE.min(axis=1) > 0) & (counts_YE.sum(axis=1) == problem.num_copies) & ~twins.any(axis=(1, 2))
    if problem.num_nodes == 1:
        return fits_Y
    held = held_by_nodes(old_YRL, problem)
    whole = held.reshape(*held.shape[:2], problem.groups, -1)
    by_groups = (whole.all(axis=3) == whole.any(axis=3)).all(axis=(1, 2)) & (held.sum(axis=1) == 1).all(axis=1)
    per_node = problem.num_experts // problem.num_nodes
    return fits_Y & by_groups & (held.sum(axis=2) == per_node).all(axis=1)


def _fresh(weights_YZ: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [Y, R, L]"""
    deal = deal_groups(weights_YZ, problem)
    weights_BZ, most = deal.split(weights_YZ), problem.num_ranks // problem.num_nodes
    extra_B = _extra_copies(weights_BZ, problem)
    bins = _packed(weights_BZ, replicate(weights_BZ, extra_B, most=most, greed="largest"), problem)
    again = np.flatnonzero(_uneven(bins) & (extra_B > 0))
    if len(again):
        counts = replicate(weights_BZ[again], extra_B[again], most=most, greed="saving")
        _keep_better(bins, again, _packed(weights_BZ[again], counts, problem))
    again = np.flatnonzero(_uneven(bins) & (extra_B > 0))
    if len(again) and problem.num_copies <= _FEW_COPIES:
        for counts in exchanges(weights_BZ[again], bins.counts_BZ[again], most=most):
            _keep_better(bins, again, _packed(weights_BZ[again], counts, problem))
    return deal.join_slots(bins.slots_BRL)


def _uneven(bins: Bins) -> np.ndarray:
    loads_BR = bins.loads_BR
    return loads_BR.max(axis=1) > _UNEVEN * loads_BR.mean(axis=1)


def _keep_better(bins: Bins, rows: np.ndarray, other: Bins) -> None:
    better = other.loads_BR.max(axis=1) < bins.loads_BR.max(axis=1)[rows]
    bins.put(rows[better], other.take(better))


def _extra_copies(weights_BZ: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [B]: redundant copies of each node: as many each, what is over to the most loaded."""
    nodes = problem.num_nodes
    share, over = divmod(problem.num_copies - problem.num_experts, nodes)
    order = (-weights_BZ.sum(axis=1).reshape(-1, nodes)).argsort(axis=1, kind="stable")
    return (share + (order.argsort(axis=1) < over)).ravel()


def _packed(weights_BZ: np.ndarray, counts_BZ: np.ndarray, problem: Problem) -> Bins:
    node_ranks = problem.num_ranks // problem.num_nodes
    shares_BZ = shares(weights_BZ, counts_BZ)
    slots_BRL = pack(shares_BZ, counts_BZ, num_ranks=node_ranks, slots_per_rank=problem.slots_per_rank)
    bins = Bins(weights_BZ=weights_BZ, counts_BZ=counts_BZ, slots_BRL=slots_BRL)
    target_B = _LEVEL * bins.loads_BR.mean(axis=1)
    level(shares_BZ, slots_BRL, target_B=target_B, rounds=_ROUNDS)
    relieve(bins, target_B=target_B, steps=_STEPS)
    return bins


def _kept(weights_YZ: np.ndarray, old_YRL: np.ndarray, target_Y: np.ndarray, problem: Problem) -> np.ndarray:
    """int64 [Y, R, L]: the placement in force, relieved until no rank carries more than the target."""
    deal = deal_as_held(old_YRL, problem)
    slots_BRL = deal.split_slots(old_YRL)
    weights_BZ = deal.split(weights_YZ)
    counts_BZ = _counts(slots_BRL, weights_BZ.shape[1])
    bins = Bins(weights_BZ=weights_BZ, counts_BZ=counts_BZ, slots_BRL=slots_BRL)
    target_B = np.repeat(target_Y, deal.num_nodes)
    relieve(bins, target_B=target_B, steps=_FEW_STEPS, thrift=_THRIFT)
    level(shares(weights_BZ, bins.counts_BZ), bins.slots_BRL, target_B=target_B, rounds=_ROUNDS)
    relieve(bins, target_B=target_B, steps=_STEPS, thrift=_THRIFT)
    return deal.join_slots(bins.slots_BRL)
