"""What the plan of bytes is told of a configuration. Reads no weight; allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ep import ExchangeConfig
from ep.capacity import CapacityPlan

from ..model.model_config import ModelConfig
from ..weights.memory import MemoryNumbers
from .config import EngineConfig
from .decisions import cache_row, longest_request, run_dtype, settle_exchange, settle_ops, topology_of
from .exchange_sizes import blueprint_of, exchange_bytes, most_at_once
from .graph_plan import graph_numbers

CPU_CACHE_BYTES = 1 << 30
"""Latent cache of a rank on a CPU when nothing is said: memory there is shared with everything else."""


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
        packs=ops == "numba",
        exchange_buffer_bytes=_exchange_bytes(config, model, capacities),
        graphs=graph_numbers(settled, model, blueprint, device=device, dtype=dtype),
        redundant_experts=config.eplb.num_redundant_experts,
        migration_limit=config.eplb.eplb_bytes_per_step if config.eplb.enable_eplb else 0,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        num_pages=cache.num_blocks,
        cache_bytes=cache.kv_cache_memory_bytes,
        cache_limit_bytes=None if on_gpu else CPU_CACHE_BYTES,
    )


def with_room_for(
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
