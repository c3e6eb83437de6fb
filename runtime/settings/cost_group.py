"""The group that a settled configuration makes, as the cost model wants it: nodes, copies, rows, padding, imbalance.

Knows configurations; does not know devices.
"""

from __future__ import annotations

from ep import Topology
from ep.blueprint import Blueprint
from ep.capacity import CapacityPlan
from moe import spread

from ..costs.device_costs import Group
from ..costs.loads import level_imbalance, loaded_imbalance
from ..costs.padding import padding_of
from ..model.model_config import ModelConfig
from .config import EngineConfig
from .decisions import run_dtype, topology_of


def group_of(
    config: EngineConfig,
    model: ModelConfig,
    *,
    tokens: int,
    capacities: CapacityPlan | None = None,
    imbalance: float = 1.0,
) -> Group:
    """`config` has nothing about nodes and the exchange left open; `tokens` a rank are what blocks are as large as."""
    topology, redundant = topology_of(config), config.eplb.num_redundant_experts
    return Group(
        ranks=config.ranks,
        node_size=topology.node_size,
        redundant=redundant,
        imbalance=imbalance,
        wire_imbalance=imbalance,
        padding=_padding(config, model, topology, tokens, capacities),
        rows_per=config.exchange.combine,
        hierarchical=config.exchange.hierarchical == "on",
    )


def expected_imbalance(config: EngineConfig, model: ModelConfig, *, tokens: float) -> float:
    """Of experts that move where they move, else of experts in order; nothing recorded is asked."""
    moe = model.moe
    if moe is None:
        return 1.0
    if config.eplb.enable_eplb or config.eplb.init_placement is not None:
        redundant = config.eplb.num_redundant_experts
        return level_imbalance(
            ranks=config.ranks, experts=moe.num_experts, redundant=redundant, top_k=moe.top_k, tokens=tokens
        )
    return loaded_imbalance(ranks=config.ranks, experts=moe.num_experts, top_k=moe.top_k, tokens=tokens)


def _padding(
    config: EngineConfig, model: ModelConfig, topology: Topology, tokens: int, capacities: CapacityPlan | None
) -> float:
    if model.moe is None or config.exchange.exchange != "bounded":
        return 1.0
    blueprint = Blueprint(
        topology=topology,
        num_slots=spread(model.moe.num_experts, config.ranks, config.eplb.num_redundant_experts).num_slots,
        hidden=model.hidden_size,
        top_k=model.moe.top_k,
        dtype=run_dtype(config, model),
        config=config.exchange,
        plan=capacities,
    )
    return padding_of(blueprint, tokens=tokens)
