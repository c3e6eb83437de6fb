"""The tensors of one MLA block: their names and shapes in a checkpoint, and the form in which attention uses them.

Knows nothing of files or ranks: tensors arrive whole, in the run dtype, or in fp8 where `fp8_names` says that they may.

Letters: D model, H heads, C latent rank, P rope dim, Q = N + P query/key head size (N without rope), V value head size,
A query latent rank, X = (A, or H*Q without a query latent) + C + P.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import MlaConfig
from .matrix import BLOCK, Matrix

__all__ = ["HeadWeights", "MlaWeights", "down_names", "fp8_names", "mla_shapes"]


def mla_shapes(config: MlaConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint names (what follows `self_attn.`) and shapes [out, in] of the tensors that one layer needs."""
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    queries = heads * config.qk_head_dim
    shapes: dict[str, tuple[int, ...]]
    if config.q_lora_rank is None:
        shapes = {"q_proj.weight": (queries, hidden)}
    else:
        shapes = {
            "q_a_proj.weight": (config.q_lora_rank, hidden),
            "q_a_layernorm.weight": (config.q_lora_rank,),
            "q_b_proj.weight": (queries, config.q_lora_rank),
        }
    return shapes | {
        "kv_a_proj_with_mqa.weight": (config.latent_width, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }


def down_names(config: MlaConfig) -> tuple[str, str]:
    """The tensors that are stacked in `MlaWeights.down_XD`."""
    return ("q_proj.weight" if config.q_lora_rank is None else "q_a_proj.weight", "kv_a_proj_with_mqa.weight")


def fp8_names(config: MlaConfig) -> frozenset[str]:
    """What may stay in fp8 blocks if it is stored so: all that is multiplied with rows as they are.

    `kv_b_proj` is not: its two halves are multiplied with queries and latents, head by head. Nor is what is stacked,
    where the first part does not end with a block.
    """
    names = {"o_proj.weight"} | ({"q_b_proj.weight"} if config.q_lora_rank is not None else set())
    first, second = down_names(config)
    return frozenset(names if mla_shapes(config)[first][0] % BLOCK else names | {first, second})


class HeadWeights(NamedTuple):
    """The two halves of kv_b, head by head, as decode rows are multiplied with them."""

    w_uk_HNC: Tensor
    w_uv_HCV: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaWeights:
    """One layer's weights, as attention uses them. `w_uk_HNC` and `w_uv_HVC` share memory with `kv_b_UC`.

    kv_b's rows, head after head:   [ N rows of head 0 | V rows of head 0 | N rows of head 1 | ... ]
    """

    down_XD: Matrix
    """Everything that reads the hidden state, in one matmul: rows [query latent or queries | latent | rope key]."""
    q_norm_A: Tensor | None
    q_b: Matrix | None
    """[H*Q, A]; None where queries come straight out of `down_XD`."""
    latent_norm_C: Tensor
    kv_b_UC: Tensor
    """U = H*(N + V)."""
    w_uk_HNC: Tensor
    w_uv_HVC: Tensor
    o_DU: Matrix
    """[D, H*V]."""

    @classmethod
    def build(cls, config: MlaConfig, tensors: Mapping[str, Tensor]) -> "MlaWeights":
        """From the tensors named by `mla_shapes` (others are ignored). One copy is made: the fused `down_XD`."""
        for name, shape in mla_shapes(config).items():
            assert tensors[name].shape == shape, f"{name} is {tuple(tensors[name].shape)}, not {shape}"
        direct = config.q_lora_rank is None
        kv_b_UC = tensors["kv_b_proj.weight"].contiguous()
        per_head = kv_b_UC.unflatten(0, (config.num_heads, -1))
        return cls(
            down_XD=torch.cat([tensors[name] for name in down_names(config)]),
            q_norm_A=None if direct else tensors["q_a_layernorm.weight"],
            q_b=None if direct else tensors["q_b_proj.weight"],
            latent_norm_C=tensors["kv_a_layernorm.weight"],
            kv_b_UC=kv_b_UC,
            w_uk_HNC=per_head[:, : config.qk_nope_head_dim],
            w_uv_HVC=per_head[:, config.qk_nope_head_dim :],
            o_DU=tensors["o_proj.weight"],
        )

    @property
    def heads(self) -> HeadWeights:
        """Views of the memory of `kv_b_UC`."""
        return HeadWeights(self.w_uk_HNC, self.w_uv_HVC.transpose(1, 2))
