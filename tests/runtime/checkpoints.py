"""Small checkpoints in Hugging Face format, written from a plain list of names: what the loaders are held against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

torch.set_num_threads(1)

# No size is a multiple of 128, so every fp8 weight has partial blocks at its edges.
SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 50,
    "hidden_size": 160,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
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
EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight"


def names_and_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a V3-shaped model, written out as the published files have them."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_a_proj.weight": (config["q_lora_rank"], hidden),
            f"{at}self_attn.q_a_layernorm.weight": (config["q_lora_rank"],),
            f"{at}self_attn.q_b_proj.weight": (heads * (nope + rope), config["q_lora_rank"]),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (config["kv_lora_rank"] + rope, hidden),
            f"{at}self_attn.kv_a_layernorm.weight": (config["kv_lora_rank"],),
            f"{at}self_attn.kv_b_proj.weight": (heads * (nope + v), config["kv_lora_rank"]),
            f"{at}self_attn.o_proj.weight": (hidden, heads * v),
        }
        if layer < config["first_k_dense_replace"]:
            shapes |= _mlp(f"{at}mlp.", hidden, config["intermediate_size"])
            continue
        shapes[f"{at}mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        shapes[f"{at}mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        width = config["moe_intermediate_size"]
        shapes |= _mlp(f"{at}mlp.shared_experts.", hidden, config["n_shared_experts"] * width)
        for expert in range(config["n_routed_experts"]):
            shapes |= _mlp(f"{at}mlp.experts.{expert}.", hidden, width)
    return shapes


def random_tensors(config: Mapping[str, Any], *, fp8: bool = False) -> dict[str, Tensor]:
    """Seeded bfloat16 tensors; with `fp8` every projection is fp8 with a scale for each 128 x 128 block."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, shape in names_and_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = values
        elif fp8 and name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")):
            tensors[name], tensors[f"{name}_scale_inv"] = _fp8(values)
        else:
            tensors[name] = values.to(torch.bfloat16)
    return tensors


def plain(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """What a tensor means, in `dtype`: an fp8 one times its blocks' scales, block by block."""
    values = tensors[name]
    if f"{name}_scale_inv" not in tensors:
        return values.to(dtype)
    exact = values.to(torch.float64)
    scale_inv = tensors[f"{name}_scale_inv"]
    for row in range(scale_inv.shape[0]):
        for column in range(scale_inv.shape[1]):
            exact[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128] *= scale_inv[row, column].item()
    return exact.to(torch.float32).to(dtype) if dtype != torch.float64 else exact


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    prefix: str = "",
) -> Path:
    """A folder with config.json and one file, or `shards` files and their index; every name gets `prefix`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for index, (name, tensor) in enumerate(named.items()) if index % shards == shard}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _mlp(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}gate_proj.weight": (inner, hidden),
        f"{at}up_proj.weight": (inner, hidden),
        f"{at}down_proj.weight": (hidden, inner),
    }


def _fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Random fp8 numbers and a scale of its own for every block, so that a wrong or dropped one shows."""
    rows, columns = -(-values.shape[0] // 128), -(-values.shape[1] // 128)
    scale_inv = torch.arange(1, rows * columns + 1, dtype=torch.float32).reshape(rows, columns) * 0.0371
    return (values * 10).to(torch.float8_e4m3fn), scale_inv


def held_bytes(weights: object) -> int:
    """Bytes of every storage that a tree of dataclasses and tuples reaches, each counted once."""
    storages: dict[int, int] = {}
    _collect(weights, storages)
    return sum(storages.values())


def _collect(node: object, storages: dict[int, int]) -> None:
    if isinstance(node, Tensor):
        storage = node.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    elif is_dataclass(node):
        for field in fields(node):
            _collect(getattr(node, field.name), storages)
    elif isinstance(node, tuple):
        for child in node:
            _collect(child, storages)
