"""The weights of one rank: what every rank holds alike, and the bank of experts in its own slots.

Knows which tensors a placement puts on a rank, and verifies all of them before it reads any; does not know files (a
`TensorSource` does), where a tensor goes (`weight_layout`) nor what the layers compute. N ranks of one process load the
shared part once and join it with each rank's banks; for ranks that are processes see `node_loading`.

Shapes: D model, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_mla import MlaWeights
from moe import ExpertBank, ExpertPlacement, Mlp, MoeWeights

from ..model.model_config import ModelConfig
from ..model.model_shapes import Shape, expert_tensors, shared_tensors
from .checkpoint import TensorSource
from .progress import Progress
from .weight_layout import (
    Places,
    SharedLayer,
    SharedWeights,
    lay_out_bank,
    lay_out_fp8_bank,
    lay_out_shared,
    none_kept,
    own_memory,
)

Placements = ExpertPlacement | Mapping[int, ExpertPlacement] | None
"""Where experts sit: alike in every layer, or by (model) layer; None for a model without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer on one rank: `dense` in the first layers, `moe` in the others."""

    input_norm_D: Tensor
    attention: MlaWeights
    post_norm_D: Tensor
    dense: Mlp | None
    moe: MoeWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Everything one rank needs to decode."""

    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor

    @classmethod
    def join(cls, shared: SharedWeights, banks: Sequence[ExpertBank | None]) -> DecoderWeights:
        """The shared part, by reference, with one rank's banks: one for each layer, None where it is dense."""
        layers = tuple(_join_layer(layer, bank) for layer, bank in zip(shared.layers, banks, strict=True))
        return cls(embed_VD=shared.embed_VD, layers=layers, norm_D=shared.norm_D, head_VD=shared.head_VD)


def placement_of(placement: ExpertPlacement | Mapping[int, ExpertPlacement], layer: int) -> ExpertPlacement:
    """That of one layer."""
    return placement if isinstance(placement, ExpertPlacement) else placement[layer]


def held_tensors(model: ModelConfig, placement: Placements, rank: int) -> dict[str, Shape]:
    """Names and shapes of all that one rank holds; see Placements."""
    return shared_tensors(model) | _bank_tensors(model, placement, rank)


def verify_held(source: TensorSource, model: ModelConfig, placement: Placements, *, ranks: Iterable[int]) -> None:
    """Check all that these ranks hold. Raises CheckpointError before anything is read."""
    shapes = shared_tensors(model)
    for rank in ranks:
        shapes |= _bank_tensors(model, placement, rank)
    source.verify(shapes)


def bytes_to_read(source: TensorSource, shapes: Iterable[str]) -> int:
    """What loading these (verified) tensors will report as progress, in bytes."""
    return sum(source.stored_bytes(name) for name in shapes)


def load_shared(
    source: TensorSource,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_fp8: bool = False,
    progress: Progress | None = None,
) -> SharedWeights:
    """Load everything but the banks, in `dtype`. Raises CheckpointError before reading.

    With `keep_fp8` what is stored in fp8 stays so where kernels can read it; otherwise it is dequantised.
    """
    source.verify(shared_tensors(model))
    places = Places(own_memory(device))
    shared = lay_out_shared(places, model, dtype=dtype, is_kept=source.is_fp8 if keep_fp8 else none_kept)
    source.read(places.wanted, progress=progress)
    return shared


def load_banks(
    source: TensorSource,
    model: ModelConfig,
    placement: Placements,
    *,
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_fp8: bool = False,
    progress: Progress | None = None,
) -> tuple[ExpertBank | None, ...]:
    """Load the experts in one rank's slots: a bank for each layer, None for a dense one.

    With `keep_fp8` a bank whose experts are stored in fp8 stays so, scales included; otherwise it is in `dtype`.
    Raises CheckpointError before reading.
    """
    source.verify(_bank_tensors(model, placement, rank))
    places = Places(own_memory(device))
    banks = lay_out_banks(places, source, model, placement, rank=rank, dtype=dtype, keep_fp8=keep_fp8)
    source.read(places.wanted, progress=progress)
    return banks


def lay_out_banks(
    places: Places,
    source: TensorSource,
    model: ModelConfig,
    placement: Placements,
    *,
    rank: int,
    dtype: torch.dtype,
    keep_fp8: bool,
) -> tuple[ExpertBank | None, ...]:
    """The banks of `load_banks`, yet to be read."""
    banks: list[ExpertBank | None] = [None] * model.num_layers
    if model.moe is not None and placement is not None:
        for layer in model.moe_layers:
            experts = placement_of(placement, layer).experts_of(rank)
            if keep_fp8 and _all_fp8(source, model, layer, experts):
                banks[layer] = lay_out_fp8_bank(places, model.moe, layer, experts)
            else:
                banks[layer] = lay_out_bank(places, model.moe, layer, experts, dtype=dtype)
    return tuple(banks)


def _join_layer(layer: SharedLayer, bank: ExpertBank | None) -> LayerWeights:
    moe = None
    if layer.gate_ED is not None:
        assert bank is not None, "a layer with a router needs a bank"
        moe = MoeWeights(gate_ED=layer.gate_ED, bias_E=layer.bias_E, shared=layer.shared, bank=bank)
    return LayerWeights(
        input_norm_D=layer.input_norm_D,
        attention=layer.attention,
        post_norm_D=layer.post_norm_D,
        dense=layer.dense,
        moe=moe,
    )


def _bank_tensors(model: ModelConfig, placement: Placements, rank: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    if model.moe is None or placement is None:
        return shapes
    for layer in model.moe_layers:
        for expert in placement_of(placement, layer).experts_of(rank):
            if expert != -1:
                shapes |= expert_tensors(model, layer, expert)
    return shapes


def _all_fp8(source: TensorSource, model: ModelConfig, layer: int, experts: Sequence[int]) -> bool:
    names = (name for expert in experts if expert != -1 for name in expert_tensors(model, layer, expert))
    return all(source.is_fp8(name) for name in names)
