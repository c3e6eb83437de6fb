"""Mixture of experts: routing, placement, local experts and the layer that ties them to the exchange."""

from ep import wide

from .config import MoeConfig
from .experts import ExpertBank, Fp8Scales, Mlp
from .layer import MoeLayer, MoeOutput, MoeWeights, expert_shapes, mlp_shapes, router_shapes, shared_shapes
from .ops import MoeOps, moe_ops
from .placement import ExpertPlacement, PlacementTable, choose_slots, most_copies, spread
from .routing import Routing, count_experts, route

__all__ = [
    "ExpertBank",
    "ExpertPlacement",
    "Fp8Scales",
    "Mlp",
    "MoeConfig",
    "MoeLayer",
    "MoeOps",
    "MoeOutput",
    "MoeWeights",
    "PlacementTable",
    "Routing",
    "choose_slots",
    "count_experts",
    "expert_shapes",
    "mlp_shapes",
    "moe_ops",
    "most_copies",
    "route",
    "router_shapes",
    "shared_shapes",
    "spread",
    "wide",
]
