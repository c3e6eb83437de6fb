"""Where every tensor of a rank goes: the weights as a tree of empty tensors, and the list of what to read into them.

Allocating is apart from reading, for two reasons. All reads are known before the first, so they can be done in the
files' order. And the tree can be laid over memory that others fill: the ranks of a node lay it over the same mapping,
and each reads a part. Nothing is copied afterwards, so what is fused is read into its place. Knows names, shapes and
places; does not know files or ranks.

Shapes: D model, E experts, F expert hidden, L local slots, V vocabulary; X, A, U, H, N, C as in attention_mla.weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attention_mla import Fp8Matrix, Matrix, MlaWeights, down_names, fp8_names, mla_shapes
from moe import ExpertBank, Fp8Scales, Mlp, MoeConfig, router_shapes, wide
from moe.quant import FP8, num_blocks

from ..model.model_config import ModelConfig
from ..model.model_shapes import EMBED, HEAD, NORM, Shape, expert_prefix, layer_prefix
from .checkpoint import Wanted

# What torch's own allocator gives: a product must not depend on where its operands lie.
ALIGNMENT = 64
_ENDLESS = 1 << 50

IsKept = Callable[[str], bool]
"""Whether a tensor is to stay in fp8, as it is stored."""

Allocate = Callable[[Shape, torch.dtype], Tensor]
"""An uninitialised contiguous tensor of this shape and dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayer:
    """One layer without its routed experts; either `dense` or the router and perhaps `shared`."""

    input_norm_D: Tensor
    attention: MlaWeights
    post_norm_D: Tensor
    dense: Mlp | None
    gate_ED: Tensor | None
    bias_E: Tensor | None
    shared: Mlp | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """What all ranks hold alike: everything but the banks. The head and the routers are float32 or wider."""

    embed_VD: Tensor
    layers: tuple[SharedLayer, ...]
    norm_D: Tensor
    head_VD: Tensor


class Places:
    """Allocates, and notes what is to be read where."""

    def __init__(self, allocate: Allocate) -> None:
        self.empty = allocate
        self.wanted: list[Wanted] = []

    def take(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Room for a tensor of its own."""
        out = self.empty(shape, dtype)
        self.note(name, out)
        return out

    def note(self, name: str, out: Tensor, scale_inv: Tensor | None = None) -> None:
        """A tensor that goes into a part of another."""
        self.wanted.append(Wanted(name=name, out=out, scale_inv=scale_inv))


class Arena:
    """Hands out one flat piece of memory, from its beginning on: the same calls give the same places."""

    def __init__(self, flat_B: Tensor) -> None:
        self._flat_B = flat_B
        self.num_bytes = 0

    @classmethod
    def measuring(cls) -> Arena:
        """One that has no memory: to see what a layout would take."""
        return cls(torch.empty(_ENDLESS, dtype=torch.uint8, device="meta"))

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See Allocate."""
        begin, size = self.num_bytes, math.prod(shape) * dtype.itemsize
        self.num_bytes = begin + -(-size // ALIGNMENT) * ALIGNMENT
        return self._flat_B[begin : begin + size].view(dtype).view(shape)


def own_memory(device: torch.device | str) -> Allocate:
    """Every tensor by itself, on one device."""
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


def none_kept(name: str) -> bool:  # noqa: ARG001
    """See IsKept: everything is dequantised."""
    return False


def lay_out_shared(
    places: Places, model: ModelConfig, *, dtype: torch.dtype, is_kept: IsKept = none_kept
) -> SharedWeights:
    """Everything but the banks. A tied model's head is its embedding once more, or the same where both are wide.

    Of what is kept in fp8, all that goes into one matrix must be.
    """
    vocabulary = (model.vocab_size, model.hidden_size)
    embed_VD = places.take(EMBED, vocabulary, dtype)
    layers = tuple(_lay_out_layer(places, model, layer, dtype, is_kept) for layer in range(model.num_layers))
    if model.tie_word_embeddings and dtype == wide(dtype):
        head_VD = embed_VD
    else:
        head_VD = places.take(EMBED if model.tie_word_embeddings else HEAD, vocabulary, wide(dtype))
    norm_D = places.take(NORM, (model.hidden_size,), dtype)
    return SharedWeights(embed_VD=embed_VD, layers=layers, norm_D=norm_D, head_VD=head_VD)


def lay_out_bank(
    places: Places, moe: MoeConfig, layer: int, experts: Sequence[int], *, dtype: torch.dtype
) -> ExpertBank:
    """The experts in one rank's slots of one layer, in `dtype`; an empty slot (-1) is left as it is."""
    num_slots, hidden, inter = len(experts), moe.hidden_size, moe.intermediate_size
    bank = ExpertBank(
        gate_up_L2FD=places.empty((num_slots, 2 * inter, hidden), dtype),
        down_LDF=places.empty((num_slots, hidden, inter), dtype),
    )
    for slot, expert in enumerate(experts):
        if expert != -1:
            _note_mlp(places, expert_prefix(layer, expert), bank.gate_up_L2FD[slot], bank.down_LDF[slot])
    return bank


def lay_out_fp8_bank(places: Places, moe: MoeConfig, layer: int, experts: Sequence[int]) -> ExpertBank:
    """The same, as fp8 with scales."""
    num_slots, hidden, inter = len(experts), moe.hidden_size, moe.intermediate_size
    scales = _empty_scales(places, num_slots, hidden, inter)
    bank = ExpertBank(
        gate_up_L2FD=places.empty((num_slots, 2 * inter, hidden), FP8),
        down_LDF=places.empty((num_slots, hidden, inter), FP8),
        scales=scales,
    )
    for slot, expert in enumerate(experts):
        if expert != -1:
            prefix = expert_prefix(layer, expert)
            _note_mlp(places, prefix, bank.gate_up_L2FD[slot], bank.down_LDF[slot], scales=scales, slot=slot)
    return bank


def _lay_out_layer(places: Places, model: ModelConfig, layer: int, dtype: torch.dtype, is_kept: IsKept) -> SharedLayer:
    prefix, hidden = layer_prefix(layer), model.hidden_size
    moe = model.moe if layer in model.moe_layers else None
    router = router_shapes(moe) if moe is not None else {}
    widened = {name: places.take(f"{prefix}mlp.{name}", shape, wide(dtype)) for name, shape in router.items()}
    mlp = partial(_lay_out_mlp, places, hidden=hidden, dtype=dtype, is_kept=is_kept)
    shared = dense = None
    if moe is None:
        dense = mlp(f"{prefix}mlp.", intermediate=model.dense_intermediate_size)
    elif moe.num_shared:
        shared = mlp(f"{prefix}mlp.shared_experts.", intermediate=moe.shared_intermediate_size)
    return SharedLayer(
        input_norm_D=places.take(f"{prefix}input_layernorm.weight", (hidden,), dtype),
        attention=_lay_out_attention(places, model, layer, dtype, is_kept),
        post_norm_D=places.take(f"{prefix}post_attention_layernorm.weight", (hidden,), dtype),
        dense=dense,
        gate_ED=widened.get("gate.weight"),
        bias_E=widened.get("gate.e_score_correction_bias"),
        shared=shared,
    )


def _lay_out_attention(
    places: Places, model: ModelConfig, layer: int, dtype: torch.dtype, is_kept: IsKept
) -> MlaWeights:
    """What `MlaWeights.build` gives, without its copy: the rows of `down_XD` are read to where it would put them."""
    mla, prefix = model.mla, f"{layer_prefix(layer)}self_attn."
    shapes, may_be_fp8 = mla_shapes(mla), fp8_names(mla)

    def matrix(*names: str) -> Matrix:
        kept = all(name in may_be_fp8 and is_kept(f"{prefix}{name}") for name in names)
        return _lay_out_matrix(places, {f"{prefix}{name}": shapes[name] for name in names}, dtype, kept=kept)

    def take(name: str) -> Tensor:
        return places.take(f"{prefix}{name}", shapes[name], dtype)

    kv_b_UC = take("kv_b_proj.weight")
    per_head = kv_b_UC.unflatten(0, (mla.num_heads, -1))
    has_query_latent = mla.q_lora_rank is not None
    return MlaWeights(
        down_XD=matrix(*down_names(mla)),
        q_norm_A=take("q_a_layernorm.weight") if has_query_latent else None,
        q_b=matrix("q_b_proj.weight") if has_query_latent else None,
        latent_norm_C=take("kv_a_layernorm.weight"),
        kv_b_UC=kv_b_UC,
        w_uk_HNC=per_head[:, : mla.qk_nope_head_dim],
        w_uv_HVC=per_head[:, mla.qk_nope_head_dim :],
        o_DU=matrix("o_proj.weight"),
    )


def _lay_out_matrix(places: Places, parts: Mapping[str, Shape], dtype: torch.dtype, *, kept: bool) -> Matrix:
    """One matrix of the rows of several tensors; in fp8 each of them, but the last, ends with a block."""
    rows, columns = [shape[0] for shape in parts.values()], next(iter(parts.values()))[1]
    values = places.empty((sum(rows), columns), FP8 if kept else dtype)
    if not kept:
        for name, out in zip(parts, values.split(rows), strict=True):
            places.note(name, out)
        return values
    blocks = [num_blocks(count) for count in rows]
    scales = places.empty((sum(blocks), num_blocks(columns)), torch.float32)
    for name, out, scale_inv in zip(parts, values.split(rows), scales.split(blocks), strict=True):
        places.note(name, out, scale_inv)
    return Fp8Matrix(values_ND=values, scales_QG=scales)


def _lay_out_mlp(
    places: Places, prefix: str, *, hidden: int, intermediate: int, dtype: torch.dtype, is_kept: IsKept
) -> Mlp:
    if all(is_kept(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down")):
        return _lay_out_fp8_mlp(places, prefix, hidden, intermediate)
    mlp = Mlp(
        gate_up_2FD=places.empty((2 * intermediate, hidden), dtype), down_DF=places.empty((hidden, intermediate), dtype)
    )
    _note_mlp(places, prefix, mlp.gate_up_2FD, mlp.down_DF)
    return mlp


def _lay_out_fp8_mlp(places: Places, prefix: str, hidden: int, intermediate: int) -> Mlp:
    scales = _empty_scales(places, 1, hidden, intermediate)
    gate_up_2FD = places.empty((2 * intermediate, hidden), FP8)
    mlp = Mlp(gate_up_2FD=gate_up_2FD, down_DF=places.empty((hidden, intermediate), FP8), scales=scales)
    _note_mlp(places, prefix, mlp.gate_up_2FD, mlp.down_DF, scales=scales)
    return mlp


def _empty_scales(places: Places, num_slots: int, hidden: int, inter: int) -> Fp8Scales:
    return Fp8Scales(
        gate_up_L2fd=places.empty((num_slots, 2, num_blocks(inter), num_blocks(hidden)), torch.float32),
        down_Ldf=places.empty((num_slots, num_blocks(hidden), num_blocks(inter)), torch.float32),
    )


def _note_mlp(
    places: Places,
    prefix: str,
    gate_up_2FD: Tensor,
    down_DF: Tensor,
    *,
    scales: Fp8Scales | None = None,
    slot: int = 0,
) -> None:
    """`scales` of as many slots as there are; those of one of them."""
    gate_FD, up_FD = gate_up_2FD.chunk(2)
    gate_scale, up_scale = scales.gate_up_L2fd[slot] if scales is not None else (None, None)
    places.note(f"{prefix}gate_proj.weight", gate_FD, gate_scale)
    places.note(f"{prefix}up_proj.weight", up_FD, up_scale)
    places.note(f"{prefix}down_proj.weight", down_DF, scales.down_Ldf[slot] if scales is not None else None)
