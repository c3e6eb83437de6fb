"""Mixture of experts: routing, placement, local experts and the layer that ties them to the exchange."""

from ep import wide

from .config import MoeConfig
from .experts import ExpertBank, Fp8Scales
from .layer import Mlp, MoeLayer, MoeOutput, MoeWeights, expert_shapes, mlp_shapes, router_shapes, shared_shapes
from .placement import ExpertPlacement, PlacementTable, choose_slots, spread
from .routing import Routing, count_experts, route

__all__ = [
    "ExpertBank",
    "ExpertPlacement",
    "Fp8Scales",
    "Mlp",
    "MoeConfig",
    "MoeLayer",
    "MoeOutput",
    "MoeWeights",
    "PlacementTable",
    "Routing",
    "choose_slots",
    "count_experts",
    "expert_shapes",
    "mlp_shapes",
    "route",
    "router_shapes",
    "shared_shapes",
    "spread",
    "wide",
]
