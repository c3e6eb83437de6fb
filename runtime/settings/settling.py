"""What a configuration leaves open, decided: number format, longest request, device, placement, and the plan of bytes.

Reads the model's configuration, no weight; allocates nothing. Whoever starts ranks and whoever only asks what they
would need decide alike here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention_mla import CacheFormat
from ep import ExchangeConfig, Topology
from ep.back_ends import installed, refusal
from ep.blueprint import Blueprint
from ep.capacity import CapacityPlan, describe
from moe import ExpertPlacement

from ..loop.rebalance import start_placements
from ..loop.routing_record import check_writable
from ..model.model_config import ModelConfig, read_model_config
from ..weights.memory import MemoryPlan, plan_memory
from .config import EngineConfig
from .decisions import (
    cache_row,
    full_step,
    longest_request,
    run_dtype,
    settle_capacities,
    settle_exchange,
    settle_ops,
    topology_of,
)
from .devices import check_sms, find_device, own_bytes
from .exchange_choice import to_try
from .memory_numbers import memory_numbers, with_room_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A configuration in which nothing is open any more."""

    config: EngineConfig
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    placements: Mapping[int, ExpertPlacement]
    """Of each MoE layer, at the start."""
    plan: MemoryPlan
    topology: Topology
    capacities: CapacityPlan | None
    """Of a bounded exchange; None: what level routing needs."""
    exchange_why: str = ""
    """How the exchange is built, and why; empty where there is none."""
    exchange_tries: tuple[ExchangeConfig, ...] = ()
    """Ways of exchange that ranks compare when they start, where each is a process; the first is the config's own."""

    @property
    def capacity_lines(self) -> list[str]:
        """The blocks of a bounded exchange that may be too small, and how often; nothing for any other."""
        model, config = self.model, self.config
        if model.moe is None or config.exchange.exchange != "bounded" or not self.placements:
            return []
        blueprint = Blueprint(
            topology=self.topology,
            num_slots=next(iter(self.placements.values())).num_slots,
            hidden=model.hidden_size,
            top_k=model.moe.top_k,
            dtype=self.dtype,
            config=config.exchange,
            plan=self.capacities,
        )
        if not any(hop.rows.may_overflow for hop in blueprint.places):
            return []
        spec = blueprint.specs[0]
        return describe(
            blueprint.places,
            bucket=full_step(config),
            level=0,
            exchanges=len(model.moe_layers),
            row_bytes=(spec.row.num_bytes, spec.back.block_row_bytes),
        )

    @property
    def from_files(self) -> tuple[object, ...]:
        """What files said beside the model's: equal on ranks that may decode together."""
        return (self.placements if self.config.eplb.init_placement else None, self.capacities)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided that a user may want to know, a line each."""
        return (f"exchange: {self.exchange_why}", *self.capacity_lines) if self.exchange_why else ()

    @property
    def cache_row(self) -> CacheFormat:
        """What a token leaves in one layer of the cache."""
        return cache_row(self.config, self.model)

    @property
    def keep_fp8(self) -> bool:
        """On a GPU, or by kernels, fp8 experts are read as they are stored; else they are dequantised in loading."""
        return self.plan.numbers.keep_fp8

    @property
    def keep_shared_fp8(self) -> bool:
        """Whether all else that is stored in fp8 stays so, where kernels can read it."""
        return self.plan.numbers.keep_shared_fp8


def settle(config: EngineConfig, *, local_size: int | None = None, ranks_here: int | None = None) -> Settled:
    """Read the model's configuration and decide what was left open; reads no weight, allocates nothing.

    local_size   ranks that the launcher put on each node; None: all of them
    ranks_here   processes of the group on this node, each with a device of its own as far as there are some; None: all
                 ranks are threads of this process, and share one

    Raises ValueError for a setting or a model that cannot run, with the arithmetic where memory is short.
    """
    model = read_model_config(Path(config.model))
    device = find_device(config.device)
    check_sms(config, device)
    placements = start_placements(config.eplb, model, ranks=config.ranks)
    check_writable(config.eplb, ranks=config.ranks)
    config = replace(config, scheduler=replace(config.scheduler, max_model_len=longest_request(config, model)))
    cache_dtype = "fp8" if cache_row(config, model).fp8 else "auto"
    config = replace(
        config, ops=settle_ops(config, model, device=device), cache=replace(config.cache, kv_cache_dtype=cache_dtype)
    )
    refused = refusal(config.exchange.exchange, device)
    if refused is not None:
        raise ValueError(refused)
    asked, on_gpu = config.exchange, device.type == "cuda"
    config, why = settle_exchange(config, model, local_size=local_size, on_gpu=on_gpu)
    tries = ()
    if on_gpu and model.moe is not None and config.ranks > 1:
        tries = to_try(asked, config.exchange, installed=installed())
    capacities = settle_capacities(config, model, placements)
    numbers = memory_numbers(
        config,
        model,
        device_bytes=own_bytes(device, config.ranks, ranks_here=ranks_here),
        on_gpu=on_gpu,
        capacities=capacities,
    )
    plan = plan_memory(model, with_room_for(numbers, config, model, tries[1:]))
    plan.check_fits()
    return Settled(
        config=config,
        model=model,
        dtype=run_dtype(config, model),
        device=device,
        placements=placements,
        plan=plan,
        topology=topology_of(config),
        capacities=capacities,
        exchange_why=why if model.moe is not None and config.ranks > 1 else "",
        exchange_tries=tries,
    )
