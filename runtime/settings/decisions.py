"""What a configuration leaves open, decided one by one, from it, a model's numbers, and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attention_mla import CacheFormat
from attention_mla.latent_rows import GROUP
from ep import Topology, choose
from ep.capacity import CapacityPlan
from moe import ExpertPlacement

from ..costs.roofline import CostShape
from ..model.model_config import ModelConfig
from ..weights.hardware import Hardware, read_hardware
from .capacities import read_capacities
from .config import DTYPES, EngineConfig
from .exchange_choice import choose_exchange
from .kernel_choice import OpsName, choose_ops


def settle_ops(config: EngineConfig, model: ModelConfig, *, device: torch.device) -> OpsName:
    """Whose kernels run. ValueError for those that can not."""
    return choose_ops(config.ops, device=device, dtype=run_dtype(config, model), page_size=config.cache.block_size)


def settle_exchange(
    config: EngineConfig, model: ModelConfig, *, local_size: int | None, on_gpu: bool
) -> tuple[EngineConfig, str]:
    """The config with nothing about nodes and the exchange left open, and why it is so, in a line.

    Raises ValueError for formats narrower than the run, and for nodes that ranks do not fill.
    """
    hardware = read_hardware(config.hardware) if config.hardware is not None else None
    return settle_exchange_on(hardware, config, model, local_size=local_size, on_gpu=on_gpu)


def settle_exchange_on(
    hardware: Hardware | None, config: EngineConfig, model: ModelConfig, *, local_size: int | None, on_gpu: bool
) -> tuple[EngineConfig, str]:
    """The same on a device whose file was read before; None: of one that has none."""
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
        hardware=hardware,
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
