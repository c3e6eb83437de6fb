"""Expert load: how much each expert is used, how evenly a placement spreads that, and placements that do it better."""

from .load import ExpertLoad, LoadWindow, balancedness, rank_loads
from .planner import POLICIES, LayerPlan, PlanConfig, RebalancePlan, check_plan, plan, predicted
from .problem import Problem
from .recording import Recording, RoutingRecorder

__all__ = [
    "POLICIES",
    "ExpertLoad",
    "LayerPlan",
    "LoadWindow",
    "PlanConfig",
    "Problem",
    "RebalancePlan",
    "Recording",
    "RoutingRecorder",
    "balancedness",
    "check_plan",
    "plan",
    "predicted",
    "rank_loads",
]
