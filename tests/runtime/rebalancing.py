"""Experts that change places all the time: a planner that plans at random, and settings that let it."""

from __future__ import annotations

import random
from typing import Any

from eplb import LayerPlan, RebalancePlan
from eplb.config import EplbConfig
from eplb.goal import Question
from tests.eplb.banks import random_placement

RESTLESS = EplbConfig(enable_eplb=True, eplb_window=1, eplb_interval=1, eplb_min_gain=0.0, eplb_bytes_per_step=150_000)


def random_planner(*_: Any) -> Any:
    """For `runtime.loop.rebalance.planner_of`: any placement, different from the last, the same on every rank."""

    def plan(question: Question) -> RebalancePlan:
        layers, experts = question.layers, question.counts_YE.shape[1]
        new = []
        for layer, had in zip(range(layers.start, layers.stop), question.old, strict=True):
            rng = random.Random(f"{layer}:{had.slot_experts}")
            new.append(random_placement(had.num_ranks, had.slots_per_rank, experts, rng))
        forecasts = tuple(LayerPlan(before=0.5, after=1.0, moves=1, changed=True) for _ in new)
        return RebalancePlan(placements=tuple(new), layers=forecasts, expert_bytes=0)

    return plan
