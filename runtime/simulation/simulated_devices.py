"""The devices of a simulated group, by the cost model: a step takes as long as its slowest rank, on all of them.

Knows shapes of steps and microseconds; does not know requests or plans' reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..costs.costs import StepCosts, StepShape
from ..scheduling.heartbeat import StepPlan
from .simulation_record import StepRecord


class Devices:
    """The devices of all ranks, which run a step together and one step after the other."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._free_us = 0.0

    def run(
        self, plan: StepPlan, shapes: Sequence[StepShape], *, ready_us: float, factors: Sequence[float]
    ) -> StepRecord:
        """A step that may begin at `ready_us`; each rank's own work takes `factors` times as long as it should."""
        begin_us = max(ready_us, self._free_us)
        length_us = self._costs.step_time(shapes, tracks=plan.tracks).total_us
        busy_us_R = [
            (length_us - wait_us) * factor
            for wait_us, factor in zip(self._costs.waits_us(shapes), factors, strict=True)
        ]
        self._free_us = begin_us + max(length_us, *busy_us_R)
        return StepRecord(
            number=plan.step,
            begin_us=begin_us,
            end_us=self._free_us,
            reason=plan.reason,
            decode_R=tuple([shape.decode_tokens for shape in shapes]),
            prefill_R=tuple([shape.prefill_tokens for shape in shapes]),
            busy_us_R=tuple(busy_us_R),
            prompt_us_R=tuple([self._prompt_us(shape) * factor for shape, factor in zip(shapes, factors, strict=True)]),
        )

    def _prompt_us(self, shape: StepShape) -> float:
        if not shape.prefill_tokens:
            return 0.0
        return self._costs.step_time([replace(shape, decode_tokens=0)]).prefill_us
