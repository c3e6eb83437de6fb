"""The memory that a configuration's exchange takes on one rank, with what a back end takes beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep import ExchangeConfig, Topology, buffer_bytes
from ep.back_ends import KEEPS_MEMORY, MAKERS
from ep.blueprint import Blueprint
from ep.capacity import CapacityPlan
from moe import spread

from ..model.model_config import ModelConfig
from .config import EngineConfig


def exchange_bytes(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    topology: Topology,
    capacities: CapacityPlan | None,
) -> int:
    """Of a config whose exchange is settled; 0 for a model without experts."""
    if model.moe is None:
        return 0
    num_slots = spread(model.moe.num_experts, config.ranks, config.eplb.num_redundant_experts).num_slots
    hidden, top_k, way = model.hidden_size, model.moe.top_k, config.exchange
    held = buffer_bytes(
        num_ranks=config.ranks,
        hidden=hidden,
        top_k=top_k,
        dtype=dtype,
        config=way,
        num_tracks=config.overlap.most_tracks,
        num_slots=num_slots,
        topology=topology,
        plan=capacities,
    )
    if way.exchange not in MAKERS:
        return held
    blueprint = Blueprint(topology=topology, num_slots=num_slots, hidden=hidden, top_k=top_k, dtype=dtype, config=way)
    return held + MAKERS[way.exchange].library_bytes(blueprint)


def most_at_once(settled: int, tried: Sequence[int], ways: Sequence[ExchangeConfig]) -> int:
    """The most that a trial of these ways holds, then the winner: one at a time, but for what keeps its memory."""
    kept = sum(size for size, way in zip(tried, ways, strict=True) if way.exchange in KEEPS_MEMORY)
    others = [size for size, way in zip(tried, ways, strict=True) if way.exchange not in KEEPS_MEMORY]
    return kept + max([settled, *others])
