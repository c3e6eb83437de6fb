"""The checkpoint on which engines are compared: DeepSeek-V3's shape with real attention widths, 303 million parameters.

Small enough for two cores, wide enough that a decode step reads weights and not Python. Random weights of a scale that
keeps activations near one through all layers, so that no engine meets infinities; the same file for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> Path:
    """The folder, with config.json and model.safetensors; written once, and found again afterwards."""
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        # Under its own name only when it is complete: a run that was stopped leaves nothing that looks whole.
        save_file(dict(_tensors()), folder / "model.part", metadata={"format": "pt"})
        os.replace(folder / "model.part", folder / "model.safetensors")
    return folder


def _tensors() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(303)
    for name, shape in _shapes():
        if len(shape) == 1:
            value = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            value = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        yield name, value.to(torch.float32 if name.endswith("bias") else torch.bfloat16)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    nope, rope, value = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"]
    query, latent = CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"]
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (CONFIG["vocab_size"], hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield f"{at}self_attn.q_a_proj.weight", (query, hidden)
        yield f"{at}self_attn.q_a_layernorm.weight", (query,)
        yield f"{at}self_attn.q_b_proj.weight", (heads * (nope + rope), query)
        yield f"{at}self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
        yield f"{at}self_attn.kv_a_layernorm.weight", (latent,)
        yield f"{at}self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
        yield f"{at}self_attn.o_proj.weight", (hidden, heads * value)
        if layer < CONFIG["first_k_dense_replace"]:
            yield from _mlp(f"{at}mlp.", CONFIG["intermediate_size"])
            continue
        yield f"{at}mlp.gate.weight", (CONFIG["n_routed_experts"], hidden)
        yield f"{at}mlp.gate.e_score_correction_bias", (CONFIG["n_routed_experts"],)
        width = CONFIG["moe_intermediate_size"]
        yield from _mlp(f"{at}mlp.shared_experts.", CONFIG["n_shared_experts"] * width)
        for expert in range(CONFIG["n_routed_experts"]):
            yield from _mlp(f"{at}mlp.experts.{expert}.", width)


def _mlp(at: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}gate_proj.weight", (inner, CONFIG["hidden_size"])
    yield f"{at}up_proj.weight", (inner, CONFIG["hidden_size"])
    yield f"{at}down_proj.weight", (CONFIG["hidden_size"], inner)
