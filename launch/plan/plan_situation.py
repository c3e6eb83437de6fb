"""What a set of settings comes to: the settings, the model, the device, and the step times they lead to.

Knows no warning; `plan_warnings` judges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from runtime.costs.costs import StepCosts, StepShape
from runtime.costs.device_costs import DeviceCosts
from runtime.costs.roofline import CostShape
from runtime.model.model_config import ModelConfig
from runtime.scheduling.overlap import comm_share
from runtime.settings.config import EngineConfig
from runtime.settings.cost_group import expected_imbalance, group_of
from runtime.settings.decisions import settle_exchange
from runtime.weights.memory import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is to be judged. `config` has the exchange as it was asked for; `settled` as it will be."""

    config: EngineConfig
    settled: EngineConfig
    model: ModelConfig
    costs: DeviceCosts
    plan: MemoryPlan
    context: int
    on_gpu: bool
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        costs: DeviceCosts,
        *,
        plan: MemoryPlan,
        context: int,
        on_gpu: bool,
        tpot_ms: float | None = None,
        ttft_ms: float | None = None,
    ) -> Self:
        """With the exchange settled, where nothing is known of nodes in nodes of 8."""
        node_size = config.node_size or (8 if config.ranks % 8 == 0 and on_gpu else None)
        settled, _ = settle_exchange(replace(config, node_size=node_size), model, local_size=None, on_gpu=on_gpu)
        return cls(
            config=config, settled=settled, model=model, costs=costs, plan=plan, context=context, on_gpu=on_gpu,
            tpot_ms=tpot_ms, ttft_ms=ttft_ms,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        """Requests that a rank can really decode at once: as many as its cache holds."""
        cached = self.plan.concurrent_requests(min(self.context, self.plan.numbers.max_model_len))
        return max(min(self.config.scheduler.max_num_seqs, cached), 1)

    @property
    def nodes(self) -> int:
        """Of the group."""
        return -(-self.settled.ranks // (self.settled.node_size or self.settled.ranks))

    def step_ms(self, *, batch: int | None = None, tracks: int = 1, hierarchical: bool | None = None) -> float:
        """A step that only decodes, by the cost model."""
        tokens = batch or self.batch
        imbalance = expected_imbalance(self.settled, self.model, tokens=tokens)
        settled = self.settled
        if hierarchical is not None:
            through = replace(settled.exchange, hierarchical="on" if hierarchical else "off")
            settled = replace(settled, exchange=through)
        group = group_of(settled, self.model, tokens=tokens, imbalance=imbalance)
        operations = self.costs.operations(self._shape, group)
        costs = StepCosts(operations, comm_share=comm_share(self.config.overlap, self.costs.hardware))
        shape = StepShape(decode_tokens=tokens, context_len=self.context)
        return costs.step_time([shape], tracks=tracks).total_us / 1e3

    def prompts_ms(self, tokens: int) -> float:
        """So many prompt tokens from the beginning of a prompt."""
        group = group_of(self.settled, self.model, tokens=self.batch)
        position = min(tokens, self.context) / 2
        return tokens * self.costs.operations(self._shape, group).prefill_us(position) / 1e3

    @property
    def _shape(self) -> CostShape:
        return CostShape.of(self.model, fp8_cache=self.config.cache.is_fp8)
