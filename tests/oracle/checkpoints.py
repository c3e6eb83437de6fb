"""Writes a family's checkpoint twice: plain, as transformers saves it, and dressed, as the published files look.

The plain folder is for the oracle; the dressed one is what our loader gets. Where they differ (fp8 blocks, prefixes,
tensors to skip) the plain one holds what the dressed one means, computed here by a loop that shares nothing with our
own code. Both hold the very same numbers, so that a difference in tokens is a difference in the decode.

Knows nothing of our engine. Tensor names come from transformers' own `save_pretrained`, not from a list kept here.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from .families import Family

CLASSES = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}
NOT_FOR_THE_CLASS = {"architectures", "model_type", "quantization_config", "torch_dtype", "dtype"}
BLOCK = 128
FP8_MAX = 448.0


def oracle_config(family: Family) -> PreTrainedConfig:
    """The explicit transformers config of a family: `kimi_k2` is no model type there, so nothing is guessed."""
    config_class, _ = CLASSES[family.oracle]
    fields = copy.deepcopy(dict(family.text_config))  # the class rewrites nested dictionaries in place
    return config_class(**{key: value for key, value in fields.items() if key not in NOT_FOR_THE_CLASS})


def write_checkpoint(family: Family, folder: Path) -> tuple[Path, Path]:
    """Write `folder`/plain and `folder`/dressed. Returns both; they are one folder where nothing differs."""
    plain, dressed = folder / "plain", folder / "dressed"
    model = random_model(family)
    model.save_pretrained(plain, max_shard_size="300KB" if family.layout == "sharded" else "5GB")
    if family.layout == "fp8":
        dressed.mkdir()
        write_fp8(plain, dressed)
    elif family.layout in REWRITES:
        dressed.mkdir()
        tensors = load_file(plain / "model.safetensors")
        save_file(REWRITES[family.layout](tensors, family), dressed / "model.safetensors")
    else:
        dressed = plain
    if not family.saved_config:
        (dressed / "config.json").write_text(json.dumps(dict(family.config), indent=2))
    return plain, dressed


def random_model(family: Family) -> PreTrainedModel:
    """A float32 or bfloat16 model whose every tensor is drawn from the family's seed, in the order of the names."""
    _, model_class = CLASSES[family.oracle]
    model = model_class(oracle_config(family))
    generator = torch.Generator().manual_seed(family.seed)
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    with torch.no_grad():
        for name in sorted(tensors):
            tensors[name].copy_(draw(name, tensors[name].shape, family=family, generator=generator))
    return model.to(getattr(torch, family.dtype))


def draw(name: str, shape: torch.Size, *, family: Family, generator: torch.Generator) -> Tensor:
    """Norms 0.7 to 1.3, the rest std 0.1, less for more than 128 inputs: a wide matrix would drown the others."""
    if name.endswith("norm.weight"):
        return 0.7 + 0.6 * torch.rand(shape, generator=generator)
    values = 0.1 * torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return values + family.bias_mean
    return values * min(1.0, 128 / shape[-1]) ** 0.5


def with_mtp_layer(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """GLM-4.7-Flash and V3 carry a multi-token-prediction block as layer `num_hidden_layers`, with its own experts."""
    last, mtp = family.text_config["num_hidden_layers"] - 1, family.text_config["num_hidden_layers"]
    hidden = family.text_config["hidden_size"]
    block = {
        name.replace(f"layers.{last}.", f"layers.{mtp}."): tensor.clone()
        for name, tensor in tensors.items()
        if f"layers.{last}." in name
    }
    extra = {
        "eh_proj.weight": torch.ones(hidden, 2 * hidden),
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "shared_head.norm.weight": torch.ones(hidden),
    }
    return tensors | block | {f"model.layers.{mtp}.{name}": tensor for name, tensor in extra.items()}


def with_stray_inv_freq(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """K2-Instruct carries rotary frequencies of the wrong length in every layer: to be ignored."""
    layers = range(family.text_config["num_hidden_layers"])
    stray = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(56, dtype=torch.bfloat16) for i in layers}
    return tensors | stray


def wrapped(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """K2.5 puts the language model under a prefix, beside a vision tower that is to be skipped."""
    vision = {
        "vision_tower.patch_embed.proj.weight": torch.ones(8, 3, 2, 2),
        "mm_projector.linear_1.weight": torch.ones(4, 4),
    }
    return vision | {f"language_model.{name}": tensor for name, tensor in tensors.items()}


REWRITES: dict[str, Callable[[dict[str, Tensor], Family], dict[str, Tensor]]] = {
    "mtp": with_mtp_layer,
    "stray_inv_freq": with_stray_inv_freq,
    "wrapped": wrapped,
}


def write_fp8(plain: Path, dressed: Path) -> None:
    """Quantise the plain checkpoint's linear weights into `dressed`; give `plain` the values they stand for.

    transformers' own fp8 loader gets partial edge blocks wrong, so the oracle is handed the dequantised float32.
    """
    generator = torch.Generator().manual_seed(1)
    means, holds = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if is_quantised(name):
            q, scale_inv = quantise(weight * uneven_blocks(weight, generator))
            holds |= {name: q, f"{name}_scale_inv": scale_inv}
            means[name] = dequantise(q, scale_inv)
        else:
            holds[name] = means[name] = weight
    save_file(means, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(holds, dressed / "model.safetensors", metadata={"format": "pt"})


def is_quantised(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def blocks(weight: Tensor) -> list[tuple[int, int, slice, slice]]:
    """(block row, block column, rows, columns) of every 128x128 block; the last of a row or column may be smaller."""
    num_rows, num_columns = weight.shape
    return [
        (r // BLOCK, c // BLOCK, slice(r, min(r + BLOCK, num_rows)), slice(c, min(c + BLOCK, num_columns)))
        for r in range(0, num_rows, BLOCK)
        for c in range(0, num_columns, BLOCK)
    ]


def scale_shape(weight: Tensor) -> tuple[int, int]:
    return (weight.shape[0] + BLOCK - 1) // BLOCK, (weight.shape[1] + BLOCK - 1) // BLOCK


def uneven_blocks(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A factor of 0.5 to 2 per block: alike blocks would hide a scale that is taken from its neighbour."""
    factors = 4.0 ** torch.rand(scale_shape(weight), generator=generator) / 2
    spread = torch.empty_like(weight)
    for i, j, rows, columns in blocks(weight):
        spread[rows, columns] = factors[i, j]
    return spread


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [N, K] and their multipliers float32 [ceil(N/128), ceil(K/128)]."""
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(scale_shape(weight))
    for i, j, rows, columns in blocks(weight):
        scale_inv[i, j] = weight[rows, columns].abs().max() / FP8_MAX
        q[rows, columns] = (weight[rows, columns] / scale_inv[i, j]).to(torch.float8_e4m3fn)
    return q, scale_inv


def dequantise(q: Tensor, scale_inv: Tensor) -> Tensor:
    weight = q.float()
    for i, j, rows, columns in blocks(weight):
        weight[rows, columns] *= scale_inv[i, j]
    return weight
