"""What steps of a settled configuration take by the cost model, and what is decided by it: how many prompt tokens a
step may hold, and when it is cut in two.
"""

from __future__ import annotations

from dbo import OverlapState

from ..costs.costs import ItlBudget, Operations, StepCosts
from ..costs.device_costs import read_device_costs
from ..costs.roofline import CostShape
from ..scheduling.cadence import StepBudget
from ..scheduling.overlap import CostModel
from ..weights.hardware import read_hardware
from .cost_group import group_of
from .decisions import full_step
from .settling import Settled


def step_budget(settled: Settled) -> StepBudget | None:
    """How many prompt tokens a step may hold by the cost model, when a latency target is set."""
    config = settled.config
    if config.cadence.itl_target_ms is None:
        return None
    return ItlBudget(costs=StepCosts(_operations(settled)), target_ms=config.cadence.itl_target_ms)


def overlap_state(settled: Settled) -> OverlapState:
    """When steps are cut, with the cost model where the device is known. ValueError for what it cannot be."""
    config = settled.config
    if config.overlap.dbo != "auto" or config.hardware is None:
        return OverlapState(config=config.overlap)
    hardware = read_hardware(config.hardware)
    return OverlapState(config=config.overlap, model=CostModel.of(_operations(settled), config.overlap, hardware))


def _operations(settled: Settled) -> Operations:
    """Times of this model's operations in this group, by the file that says what the device is."""
    config = settled.config
    group = group_of(config, settled.model, tokens=full_step(config), capacities=settled.capacities)
    return read_device_costs(config.hardware or "").operations(
        CostShape.of(settled.model, fp8_cache=settled.cache_row.fp8), group
    )
