"""What a configuration leaves open, decided: number format, longest request, device, placement, and the plan of bytes.

Reads the model's configuration, no weight; allocates nothing. Whoever starts ranks and whoever only asks what they
would need decide alike here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ep import buffer_bytes
from moe import ExpertPlacement, spread

from .config import DTYPES, EngineConfig
from .memory import MemoryNumbers, MemoryPlan, plan_memory
from .model_config import ModelConfig, read_model_config

CPU_CACHE_BYTES = 1 << 30
"""Latent cache of a rank on a CPU when nothing is said: memory there is shared with everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A configuration in which nothing is open any more."""

    config: EngineConfig
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    placement: ExpertPlacement | None
    plan: MemoryPlan

    @property
    def keep_fp8(self) -> bool:
        """On a GPU kernels read fp8 experts as they are stored; on a CPU they are dequantised while loading."""
        return self.device.type == "cuda"


def settle(config: EngineConfig) -> Settled:
    """Read the model's configuration and decide what was left open; reads no weight, allocates nothing.

    Raises ValueError for a setting or a model that cannot run, with the arithmetic where memory is short.
    """
    model = read_model_config(Path(config.model))
    device = _device(config.device)
    placement = spread(model.moe.num_experts, config.ranks) if model.moe is not None else None
    config = replace(config, scheduler=replace(config.scheduler, max_model_len=longest_request(config, model)))
    numbers = memory_numbers(
        config, model, device_bytes=_device_bytes(device) // config.ranks, on_gpu=device.type == "cuda"
    )
    plan = plan_memory(model, numbers)
    plan.check_fits()
    return Settled(
        config=config, model=model, dtype=run_dtype(config, model), device=device, placement=placement, plan=plan
    )


def run_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """The number format of weights and activations."""
    return model.dtype if config.dtype == "auto" else DTYPES[config.dtype]


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Prompt and output together, in tokens. Raises ValueError for more than the model allows."""
    longest = config.scheduler.max_model_len or model.max_position
    if longest > model.max_position:
        raise ValueError(f"max_model_len is {longest}; the model allows at most {model.max_position}")
    return longest


def memory_numbers(config: EngineConfig, model: ModelConfig, *, device_bytes: int, on_gpu: bool) -> MemoryNumbers:
    """What the plan depends on. `device_bytes` is one rank's own; a GPU's kernels take fp8 experts as stored."""
    cache, scheduler, dtype = config.cache, config.scheduler, run_dtype(config, model)
    return MemoryNumbers(
        ranks=config.ranks,
        dtype_bytes=dtype.itemsize,
        device_bytes=device_bytes,
        max_model_len=longest_request(config, model),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        page_size=cache.block_size,
        keep_fp8=on_gpu,
        exchange_buffer_bytes=_exchange_bytes(config, model, dtype),
        gpu_memory_utilization=cache.gpu_memory_utilization,
        num_pages=cache.num_blocks,
        cache_bytes=cache.kv_cache_memory_bytes,
        cache_limit_bytes=None if on_gpu else CPU_CACHE_BYTES,
    )


def _exchange_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    if model.moe is None:
        return 0
    return buffer_bytes(
        num_ranks=config.ranks,
        hidden=model.hidden_size,
        top_k=model.moe.top_k,
        dtype=dtype,
        config=config.exchange,
    )


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(
            f"device is {name!r}; it must be cpu or cuda, e.g. cpu; a rank takes the GPU of its local rank"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch sees no CUDA device; install a CUDA build of torch and a driver, or use cpu"
        )
    return torch.device(name)


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
