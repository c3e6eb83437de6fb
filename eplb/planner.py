"""From loads and the placements in force to new placements: what is gained, what has to move, and which layers stay.

Pure: the same loads, placements and config give the same plan on every rank, so ranks plan for themselves and agree.
Policies by name are in `POLICIES`; how experts then travel is not known here.

Legend: Y the MoE layers of a model, E experts, S slots of all ranks, R ranks, L local slots of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe import ExpertPlacement

from .deepseek import deepseek
from .packing import whole_weights
from .problem import Policy, Problem
from .serried import expected, serried

POLICIES: dict[str, Policy] = {"serried": serried, "deepseek": deepseek}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How to plan.

    num_redundant    copies beyond one of each expert
    top_k            experts a token visits
    node_size        ranks on a node; 0: all ranks on one
    groups           groups of experts by which routing is limited (a model's n_group); 1: none
    tokens_per_rank  tokens that a rank brings to a step; 0: plan for averages, without the noise of single steps
    min_gain         part of a layer's time at its fullest rank that a new placement must save, or the layer stays
    expert_bytes     bytes of one expert of one layer
    """

    num_redundant: int = 0
    top_k: int = 1
    node_size: int = 0
    groups: int = 1
    tokens_per_rank: float = 0.0
    min_gain: float = 0.0
    policy: str = "serried"
    expert_bytes: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"eplb_policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}, e.g. serried")
        if not 0.0 <= self.min_gain < 1.0:
            raise ValueError(f"eplb_min_gain is {self.min_gain}; it must be from 0 to below 1, e.g. 0.02")
        if not 0.0 <= self.tokens_per_rank < float("inf"):
            raise ValueError(f"tokens_per_rank is {self.tokens_per_rank}; it must be at least 0, e.g. 128")
        for name, least in (("num_redundant", 0), ("top_k", 1), ("node_size", 0), ("groups", 1), ("expert_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}, e.g. {max(least, 1)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer: how busy the average rank is while the fullest works, before and after, and copies ranks must fetch.

    changed   it gets a new placement; that may come without moves, when copies are only given up
    """

    before: float
    after: float
    moves: int
    changed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalancePlan:
    """What to do. A layer that is not worth moving keeps its placement, the same object."""

    placements: tuple[ExpertPlacement, ...]
    layers: tuple[LayerPlan, ...]
    expert_bytes: int

    @property
    def changed(self) -> tuple[int, ...]:
        """Layers that get a new placement."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.changed)

    @property
    def num_moves(self) -> int:
        """Copies that some rank must fetch, because it does not hold the expert yet."""
        return sum(layer.moves for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of those copies."""
        return self.num_moves * self.expert_bytes

    @property
    def before(self) -> float:
        """Balancedness of all layers together as they are: sum of means over sum of expected maxima."""
        return _together([layer.before for layer in self.layers])

    @property
    def after(self) -> float:
        """The same with the new placements."""
        return _together([layer.after for layer in self.layers])


def check_plan(config: PlanConfig, *, num_experts: int, num_ranks: int) -> None:
    """Raises ValueError, in words, when no placement of this kind exists."""
    most = num_experts * (num_ranks - 1)
    if config.num_redundant > most:
        raise ValueError(
            f"num_redundant_experts {config.num_redundant} must be from 0 to {most}: on {num_ranks} ranks no expert "
            f"has use for more copies than that, so {most} would do"
        )
    if num_experts % config.groups:
        raise ValueError(f"groups is {config.groups}; it must divide the {num_experts} experts, e.g. 1")
    rest = (num_experts + config.num_redundant) % num_ranks
    if config.policy == "deepseek" and rest:
        raise ValueError(
            f"num_redundant_experts {config.num_redundant} does not fit eplb_policy deepseek: {num_experts} experts "
            f"and their copies must be a multiple of {num_ranks} ranks; "
            f"{config.num_redundant + num_ranks - rest} would do, or eplb_policy serried"
        )


def plan(loads_YE: Tensor | np.ndarray, *, old: Sequence[ExpertPlacement], config: PlanConfig) -> RebalancePlan:
    """Plan all layers.

    loads_YE  numbers [Y, E] of pairs (or any multiple); a layer of zeros stays as it is
    old       the placements in force, one a layer, all of the same numbers of ranks and slots
    """
    loads = np.ascontiguousarray(torch.as_tensor(loads_YE).cpu().numpy(), dtype=np.float64)
    num_layers, num_experts = loads.shape
    assert num_layers == len(old), f"loads of {num_layers} layers, {len(old)} placements"
    if not old:
        return RebalancePlan(placements=(), layers=(), expert_bytes=config.expert_bytes)
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise ValueError("loads hold a negative or infinite number; they must be counts of at least 0, e.g. 0")
    problem = _problem(old, config, num_experts=num_experts)
    old_YS = np.array([placement.slot_experts for placement in old])
    loaded = np.flatnonzero(loads.sum(axis=1) > 0)
    new_YS = old_YS.copy()
    if len(loaded):
        new_YS[loaded] = POLICIES[config.policy](loads[loaded], problem, old_YS[loaded])
    before_Y, after_Y = [predicted(loads, slots, problem) for slots in (old_YS, new_YS)]
    # Times at the fullest rank are 1 / balancedness.
    stays_Y = (new_YS == old_YS).all(axis=1) | (1.0 / after_Y > (1.0 - config.min_gain) / before_Y)
    stays_Y |= after_Y <= before_Y
    new_YS[stays_Y], after_Y[stays_Y] = old_YS[stays_Y], before_Y[stays_Y]
    moves_Y = num_arrivals(old_YS, new_YS, problem.num_ranks, num_experts=num_experts)
    epoch = max(placement.epoch for placement in old) + 1
    return RebalancePlan(
        placements=tuple(
            before if stays else replace(before, slot_experts=tuple(slots.tolist()), epoch=epoch)
            for before, slots, stays in zip(old, new_YS, stays_Y, strict=True)
        ),
        layers=tuple(
            LayerPlan(before=float(before), after=float(after), moves=int(moves), changed=not stays)
            for before, after, moves, stays in zip(before_Y, after_Y, moves_Y, stays_Y, strict=True)
        ),
        expert_bytes=config.expert_bytes,
    )


def predicted(loads_YE: np.ndarray, slots_YS: np.ndarray, problem: Problem) -> np.ndarray:
    """float64 [Y] in (0, 1]: mean over expected maximum of the ranks' loads; 1 without load."""
    slots = np.where(slots_YS < 0, problem.num_experts, slots_YS)
    by_rank = slots.reshape(len(slots), problem.num_ranks, problem.slots_per_rank)
    return 1.0 / expected(whole_weights(loads_YE), by_rank, problem)


def num_arrivals(old_YS: np.ndarray, new_YS: np.ndarray, num_ranks: int, *, num_experts: int) -> np.ndarray:
    """int64 [Y]: copies of experts on ranks that did not hold the expert before."""
    held = [np.zeros((len(old_YS), num_ranks, num_experts + 1), bool) for _ in range(2)]
    for where, slots in zip(held, (old_YS, new_YS), strict=True):
        by_rank = slots.reshape(len(slots), num_ranks, -1)
        np.put_along_axis(where, np.where(by_rank < 0, num_experts, by_rank), True, axis=2)
    return (held[1] & ~held[0])[:, :, :num_experts].sum(axis=(1, 2))


def _problem(old: Sequence[ExpertPlacement], config: PlanConfig, *, num_experts: int) -> Problem:
    num_ranks, slots_per_rank = old[0].num_ranks, old[0].slots_per_rank
    for layer, placement in enumerate(old):
        shape = placement.num_ranks, placement.slots_per_rank, placement.num_experts
        assert shape == (num_ranks, slots_per_rank, num_experts), f"layer {layer}: {shape}"
    check_plan(config, num_experts=num_experts, num_ranks=num_ranks)
    num_copies = num_experts + config.num_redundant
    needed = -(-num_copies // num_ranks)
    if slots_per_rank != needed:
        raise ValueError(
            f"num_redundant_experts {config.num_redundant} needs {needed} slots a rank, the placement in force has "
            f"{slots_per_rank}; {num_ranks * slots_per_rank - num_experts} would do"
        )
    return Problem(
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=slots_per_rank,
        num_copies=num_copies,
        node_size=config.node_size or num_ranks,
        groups=config.groups,
        top_k=config.top_k,
        tokens_per_rank=config.tokens_per_rank,
    )


def _together(values: Sequence[float]) -> float:
    return len(values) / sum(1.0 / value for value in values) if values else 1.0
