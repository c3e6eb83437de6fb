"""One small random V3-shaped model, and a way to run requests through an engine with any settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dbo import DboConfig
from ep import ExchangeConfig
from runtime import CacheConfig, Engine, EngineConfig, RequestOutput, SamplingParams, SchedulerConfig

torch.set_num_threads(1)

SMALL_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

TWO_LAYERS = SMALL_V3 | {
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""A dense layer and one of experts: for kernels in the interpreter, which takes its time."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a test mix."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The knobs that must change no token and no log-probability."""

    ranks: int = 1
    async_depth: int = 0
    max_num_batched_tokens: int = 8192
    block_size: int = 64
    num_blocks: int | None = 32
    max_num_seqs: int = 16
    enable_prefix_caching: bool = False
    round_tokens: int = 1024
    combine: str = "ranks"
    policy: str = "fcfs"
    dtype: str = "float64"
    draft_share: float | None = None
    tracks: int = 1
    track_order: str = "abreast"


def engine_config(model: Path, settings: Settings) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        ranks=settings.ranks,
        dtype=settings.dtype,
        load_format="dummy",
        async_depth=settings.async_depth,
        cache=CacheConfig(block_size=settings.block_size, num_blocks=settings.num_blocks),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            scheduling_policy=settings.policy,
            enable_prefix_caching=settings.enable_prefix_caching,
        ),
        exchange=ExchangeConfig(round_tokens=settings.round_tokens, combine=settings.combine),
        overlap=overlap_config(settings),
    )


def overlap_config(settings: Settings) -> DboConfig:
    """Every step is cut that can be."""
    return DboConfig(
        dbo="on" if settings.tracks > 1 else "off",
        dbo_tracks=max(settings.tracks, 2),
        dbo_order=settings.track_order,
        dbo_decode_token_threshold=1,
        dbo_prefill_token_threshold=1,
    )


def run_mix(model: Path, asks: Sequence[Ask], settings: Settings, **engine: Any) -> list[RequestOutput]:
    """All requests at once, outputs in the order of `asks`; the cache must be whole again afterwards."""
    with Engine(engine_config(model, settings), **engine) as running:
        for index, ask in enumerate(asks):
            running.submit(ask.prompt, ask.params, request_id=str(index), priority=ask.priority)
        outputs = {output.request_id: output for output in running.run()}
        for stats in running.stats().ranks:
            assert stats.free_pages == stats.num_pages, f"rank {stats.rank} leaked pages"
    return [outputs[str(index)] for index in range(len(asks))]
