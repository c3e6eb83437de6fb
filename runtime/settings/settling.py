"""What a configuration leaves open, decided: number format, longest request, device, placement, and the plan of bytes.

Reads the model's configuration, no weight; allocates nothing. Whoever starts ranks and whoever only asks what they
would need decide alike here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention_mla import CacheFormat
from attention_mla.latent_rows import GROUP
from ep import ExchangeConfig, Topology, choose
from ep.back_ends import installed, refusal
from ep.blueprint import Blueprint
from ep.capacity import CapacityPlan, describe
from moe import ExpertPlacement

from ..costs.roofline import CostShape
from ..loop.rebalance import start_placements
from ..loop.routing_record import check_writable
from ..model.model_config import ModelConfig, read_model_config
from ..weights.hardware import read_hardware
from ..weights.memory import MemoryNumbers, MemoryPlan, plan_memory
from .capacities import read_capacities
from .config import DTYPES, EngineConfig
from .devices import check_sms, find_device, own_bytes
from .exchange_choice import choose_exchange, to_try
from .exchange_sizes import blueprint_of, exchange_bytes, most_at_once
from .graph_plan import graph_numbers
from .kernel_choice import OpsName, choose_ops

CPU_CACHE_BYTES = 1 << 30
"""Latent cache of a rank on a CPU when nothing is said: memory there is shared with everything else."""


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
    plan = plan_memory(model, _whoever_wins(numbers, config, model, tries[1:]))
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


def settle_ops(config: EngineConfig, model: ModelConfig, *, device: torch.device) -> OpsName:
    """Whose kernels run. ValueError for those that can not."""
    return choose_ops(config.ops, device=device, dtype=run_dtype(config, model), page_size=config.cache.block_size)


def settle_exchange(
    config: EngineConfig, model: ModelConfig, *, local_size: int | None, on_gpu: bool
) -> tuple[EngineConfig, str]:
    """The config with nothing about nodes and the exchange left open, and why it is so, in a line.

    Raises ValueError for formats narrower than the run, and for nodes that ranks do not fill.
    """
    config.exchange.refuse_narrow(run_dtype(config, model))
    node_size = min(config.node_size or local_size or config.ranks, config.ranks)
    choice = choose_exchange(
        CostShape.of(model, fp8_cache=config.cache.is_fp8),
        mode=config.exchange.exchange,
        hierarchical=config.exchange.hierarchical,
        ranks=config.ranks,
        node_size=node_size,
        tokens=full_step(config),
        on_gpu=on_gpu,
        hardware=read_hardware(config.hardware) if config.hardware is not None else None,
    )
    exchange = choose(config.exchange, exchange=choice.mode, hierarchical="on" if choice.hierarchical else "off")
    return replace(config, exchange=exchange, node_size=node_size), choice.why


def settle_capacities(
    config: EngineConfig, model: ModelConfig, placements: Mapping[int, ExpertPlacement]
) -> CapacityPlan | None:
    """Of a settled config: those of the file, None where there is none. ValueError where nothing would use them."""
    if config.capacities is None:
        return None
    if model.moe is None or config.exchange.exchange != "bounded":
        raise ValueError(
            f"capacities is {config.capacities!r}, but the exchange is {config.exchange.exchange}; "
            "give --exchange bounded, or leave it out"
        )
    return read_capacities(
        config.capacities,
        placements,
        topology_of(config),
        tokens=full_step(config),
        top_k=model.moe.top_k,
        config=config.exchange,
    )


def full_step(config: EngineConfig) -> int:
    """Tokens of a step in which a rank decodes as many requests as it may."""
    return min(config.scheduler.max_num_seqs, config.exchange.round_tokens)


def topology_of(config: EngineConfig) -> Topology:
    """The nodes of a settled config; ranks that do not fill nodes evenly are taken to be on a node each."""
    node_size = config.node_size or config.ranks
    return Topology(num_ranks=config.ranks, node_size=node_size if config.ranks % node_size == 0 else 1)


def run_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """The number format of weights and activations."""
    return model.dtype if config.dtype == "auto" else DTYPES[config.dtype]


def cache_row(config: EngineConfig, model: ModelConfig) -> CacheFormat:
    """What a token leaves in one layer of the cache. ValueError for a format that the run or the model cannot have."""
    dtype, asked, rank = run_dtype(config, model), config.cache.kv_cache_dtype, model.mla.kv_lora_rank
    if asked == "bfloat16" and dtype is not torch.bfloat16:
        raise ValueError(
            f"kv_cache_dtype is 'bfloat16' in a run of {str(dtype).removeprefix('torch.')}; latents are kept as the "
            "run has them or in fp8, e.g. auto"
        )
    if config.cache.is_fp8 and dtype is torch.float64:
        raise ValueError(f"kv_cache_dtype is {asked!r}; in a float64 run nothing is narrower, it must be auto")
    if config.cache.is_fp8 and rank % GROUP:
        raise ValueError(
            f"kv_cache_dtype is {asked!r}; a scale stands for {GROUP} values, and the model's kv_lora_rank is {rank}; "
            "it must be auto"
        )
    return CacheFormat.of(model.mla, dtype, fp8=config.cache.is_fp8)


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Prompt and output together, in tokens. Raises ValueError for more than the model allows."""
    longest = config.scheduler.max_model_len or model.max_position
    if longest > model.max_position:
        raise ValueError(f"max_model_len is {longest}; the model allows at most {model.max_position}")
    return longest


def memory_numbers(
    config: EngineConfig,
    model: ModelConfig,
    *,
    device_bytes: int,
    on_gpu: bool,
    capacities: CapacityPlan | None = None,
) -> MemoryNumbers:
    """What the plan depends on. `device_bytes` is one rank's own; kernels take what is in fp8 as stored."""
    config, _ = settle_exchange(config, model, local_size=None, on_gpu=on_gpu)
    cache, scheduler, dtype = config.cache, config.scheduler, run_dtype(config, model)
    device = torch.device("cuda" if on_gpu else "cpu")
    ops = settle_ops(config, model, device=device)
    settled = replace(config, ops=ops)
    blueprint = blueprint_of(config, model, dtype=dtype, topology=topology_of(config), capacities=capacities)
    return MemoryNumbers(
        ranks=config.ranks,
        dtype_bytes=dtype.itemsize,
        device_bytes=device_bytes,
        max_model_len=longest_request(config, model),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        page_size=cache.block_size,
        keep_fp8=on_gpu or ops == "triton",
        keep_shared_fp8=ops == "triton",
        fp8_cache=cache_row(config, model).fp8,
        packs=ops == "onednn",
        exchange_buffer_bytes=_exchange_bytes(config, model, capacities),
        graphs=graph_numbers(settled, model, blueprint, device=device, dtype=dtype),
        redundant_experts=config.eplb.num_redundant_experts,
        migration_limit=config.eplb.eplb_bytes_per_step if config.eplb.enable_eplb else 0,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        num_pages=cache.num_blocks,
        cache_bytes=cache.kv_cache_memory_bytes,
        cache_limit_bytes=None if on_gpu else CPU_CACHE_BYTES,
    )


def _whoever_wins(
    numbers: MemoryNumbers, config: EngineConfig, model: ModelConfig, others: Sequence[ExchangeConfig]
) -> MemoryNumbers:
    """With room for the other ways of exchange that are tried, one after the other, and for graphs of any of them."""
    ways = [replace(config, exchange=other) for other in others]
    tried = [memory_numbers(way, model, device_bytes=numbers.device_bytes, on_gpu=True) for way in ways]
    held = most_at_once(numbers.exchange_buffer_bytes, [each.exchange_buffer_bytes for each in tried], others)
    graphs = numbers.graphs
    if graphs is not None:
        graphs = graphs._replace(works=sum([each.graphs.works for each in tried if each.graphs], graphs.works))
    return replace(numbers, exchange_buffer_bytes=held, graphs=graphs)


def _exchange_bytes(config: EngineConfig, model: ModelConfig, capacities: CapacityPlan | None) -> int:
    return exchange_bytes(
        config, model, dtype=run_dtype(config, model), topology=topology_of(config), capacities=capacities
    )
