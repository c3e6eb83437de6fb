"""The memory that a configuration's exchange takes on one rank, with what a back end takes beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep import ExchangeConfig, Topology
from ep.back_ends import KEEPS_MEMORY, MAKERS
from ep.blueprint import Blueprint
from ep.capacity import CapacityPlan
from moe import spread

from ..model.model_config import ModelConfig
from .config import EngineConfig


def blueprint_of(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    topology: Topology,
    capacities: CapacityPlan | None,
) -> Blueprint | None:
    """Of a config whose exchange is settled; None for a model without experts."""
    if model.moe is None:
        return None
    return Blueprint(
        topology=topology,
        num_slots=spread(model.moe.num_experts, config.ranks, config.eplb.num_redundant_experts).num_slots,
        hidden=model.hidden_size,
        top_k=model.moe.top_k,
        dtype=dtype,
        config=config.exchange,
        plan=capacities,
    )


def exchange_bytes(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    topology: Topology,
    capacities: CapacityPlan | None,
) -> int:
    """Of a config whose exchange is settled; 0 for a model without experts."""
    blueprint = blueprint_of(config, model, dtype=dtype, topology=topology, capacities=capacities)
    if blueprint is None:
        return 0
    mode = config.exchange.exchange
    held = config.overlap.most_tracks * blueprint.num_bytes
    return held + (MAKERS[mode].library_bytes(blueprint) if mode in MAKERS else 0)


def most_at_once(settled: int, tried: Sequence[int], ways: Sequence[ExchangeConfig]) -> int:
    """The most that a trial of these ways holds, then the winner: one at a time, but for what keeps its memory."""
    kept = sum(size for size, way in zip(tried, ways, strict=True) if way.exchange in KEEPS_MEMORY)
    others = [size for size, way in zip(tried, ways, strict=True) if way.exchange not in KEEPS_MEMORY]
    return kept + max([settled, *others])
