"""The weights of one rank: what every rank holds alike, and the bank of experts in its own slots.

Knows which tensors a placement puts on a rank, and verifies all of them before it reads any; does not know files (a
`TensorSource` does) nor what the layers compute. N ranks of one process load the shared part once and join it with
each rank's banks.

Shapes: D model, E experts, F expert hidden, L local slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_mla import MlaWeights, mla_shapes
from moe import ExpertBank, ExpertPlacement, Fp8Scales, Mlp, MoeConfig, MoeWeights, router_shapes, wide
from moe.quant import FP8, num_blocks

from .checkpoint import TensorSource
from .model_config import ModelConfig
from .model_shapes import EMBED, HEAD, NORM, Shape, expert_prefix, expert_tensors, layer_prefix, shared_tensors

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


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


def held_tensors(model: ModelConfig, placement: ExpertPlacement | None, rank: int) -> dict[str, Shape]:
    """Names and shapes of all that one rank holds; `placement` is None for a model without experts."""
    return shared_tensors(model) | _bank_tensors(model, placement, rank)


def verify_held(
    source: TensorSource, model: ModelConfig, placement: ExpertPlacement | None, *, ranks: Iterable[int]
) -> None:
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
    progress: Progress | None = None,
) -> SharedWeights:
    """Load everything but the banks, in `dtype`; fp8 is dequantised. Raises CheckpointError before reading."""
    source.verify(shared_tensors(model))
    reader = _Reader(source, device=device, progress=progress)
    embed_VD = reader.read(EMBED, (model.vocab_size, model.hidden_size), dtype)
    layers = tuple(_load_layer(reader, model, layer, dtype) for layer in range(model.num_layers))
    if model.tie_word_embeddings:
        head_VD = embed_VD.to(wide(dtype))
    else:
        head_VD = reader.read(HEAD, (model.vocab_size, model.hidden_size), wide(dtype))
    norm_D = reader.read(NORM, (model.hidden_size,), dtype)
    return SharedWeights(embed_VD=embed_VD, layers=layers, norm_D=norm_D, head_VD=head_VD)


def load_banks(
    source: TensorSource,
    model: ModelConfig,
    placement: ExpertPlacement | None,
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
    reader = _Reader(source, device=device, progress=progress)
    banks: list[ExpertBank | None] = [None] * model.num_layers
    if model.moe is not None and placement is not None:
        experts = placement.experts_of(rank)
        for layer in model.moe_layers:
            if keep_fp8 and _all_fp8(source, model, layer, experts):
                banks[layer] = _load_fp8_bank(reader, model.moe, layer, experts)
            else:
                banks[layer] = _load_plain_bank(reader, model.moe, layer, experts, dtype)
    return tuple(banks)


class _Reader:
    """Allocates destinations on one device and reports progress; what a source gives, put in its place."""

    def __init__(self, source: TensorSource, *, device: torch.device | str, progress: Progress | None) -> None:
        self.source = source
        self.device = device
        self._progress = progress or (lambda _: None)

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def read(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        out = self.empty(shape, dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        self.source.read_into(name, out)
        self._progress(self.source.stored_bytes(name))

    def read_fp8_into(self, name: str, out: Tensor, scale_inv: Tensor) -> None:
        self.source.read_fp8_into(name, out, scale_inv)
        self._progress(self.source.stored_bytes(name))


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


def _bank_tensors(model: ModelConfig, placement: ExpertPlacement | None, rank: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    if model.moe is None or placement is None:
        return shapes
    for layer in model.moe_layers:
        for expert in placement.experts_of(rank):
            if expert != -1:
                shapes |= expert_tensors(model, layer, expert)
    return shapes


def _load_layer(reader: _Reader, model: ModelConfig, layer: int, dtype: torch.dtype) -> SharedLayer:
    prefix, hidden = layer_prefix(layer), model.hidden_size
    attention = {
        name: reader.read(f"{prefix}self_attn.{name}", shape, dtype) for name, shape in mla_shapes(model.mla).items()
    }
    moe = model.moe if layer in model.moe_layers else None
    router = router_shapes(moe) if moe is not None else {}
    widened = {name: reader.read(f"{prefix}mlp.{name}", shape, wide(dtype)) for name, shape in router.items()}
    shared = dense = None
    if moe is None:
        dense = _load_mlp(reader, f"{prefix}mlp.", hidden, model.dense_intermediate_size, dtype)
    elif moe.num_shared:
        shared = _load_mlp(reader, f"{prefix}mlp.shared_experts.", hidden, moe.shared_intermediate_size, dtype)
    return SharedLayer(
        input_norm_D=reader.read(f"{prefix}input_layernorm.weight", (hidden,), dtype),
        attention=MlaWeights.build(model.mla, attention),
        post_norm_D=reader.read(f"{prefix}post_attention_layernorm.weight", (hidden,), dtype),
        dense=dense,
        gate_ED=widened.get("gate.weight"),
        bias_E=widened.get("gate.e_score_correction_bias"),
        shared=shared,
    )


def _load_mlp(reader: _Reader, prefix: str, hidden: int, intermediate: int, dtype: torch.dtype) -> Mlp:
    mlp = Mlp(
        gate_up_2FD=reader.empty((2 * intermediate, hidden), dtype), down_DF=reader.empty((hidden, intermediate), dtype)
    )
    _read_mlp(reader, prefix, mlp.gate_up_2FD, mlp.down_DF)
    return mlp


def _read_mlp(reader: _Reader, prefix: str, gate_up_2FD: Tensor, down_DF: Tensor) -> None:
    gate_FD, up_FD = gate_up_2FD.chunk(2)
    reader.read_into(f"{prefix}gate_proj.weight", gate_FD)
    reader.read_into(f"{prefix}up_proj.weight", up_FD)
    reader.read_into(f"{prefix}down_proj.weight", down_DF)


def _all_fp8(source: TensorSource, model: ModelConfig, layer: int, experts: Sequence[int]) -> bool:
    names = (name for expert in experts if expert != -1 for name in expert_tensors(model, layer, expert))
    return all(source.is_fp8(name) for name in names)


def _load_plain_bank(
    reader: _Reader, moe: MoeConfig, layer: int, experts: Sequence[int], dtype: torch.dtype
) -> ExpertBank:
    num_slots, hidden, inter = len(experts), moe.hidden_size, moe.intermediate_size
    bank = ExpertBank(
        gate_up_L2FD=reader.empty((num_slots, 2 * inter, hidden), dtype),
        down_LDF=reader.empty((num_slots, hidden, inter), dtype),
    )
    for slot, expert in enumerate(experts):
        if expert != -1:
            _read_mlp(reader, expert_prefix(layer, expert), bank.gate_up_L2FD[slot], bank.down_LDF[slot])
    return bank


def _load_fp8_bank(reader: _Reader, moe: MoeConfig, layer: int, experts: Sequence[int]) -> ExpertBank:
    num_slots, hidden, inter = len(experts), moe.hidden_size, moe.intermediate_size
    scales = Fp8Scales(
        gate_up_L2fd=reader.empty((num_slots, 2, num_blocks(inter), num_blocks(hidden)), torch.float32),
        down_Ldf=reader.empty((num_slots, num_blocks(hidden), num_blocks(inter)), torch.float32),
    )
    bank = ExpertBank(
        gate_up_L2FD=reader.empty((num_slots, 2 * inter, hidden), FP8),
        down_LDF=reader.empty((num_slots, hidden, inter), FP8),
        scales=scales,
    )
    for slot, expert in enumerate(experts):
        if expert != -1:
            prefix = expert_prefix(layer, expert)
            gate_FD, up_FD = bank.gate_up_L2FD[slot].chunk(2)
            gate_scale, up_scale = scales.gate_up_L2fd[slot]
            reader.read_fp8_into(f"{prefix}gate_proj.weight", gate_FD, gate_scale)
            reader.read_fp8_into(f"{prefix}up_proj.weight", up_FD, up_scale)
            reader.read_fp8_into(f"{prefix}down_proj.weight", bank.down_LDF[slot], scales.down_Ldf[slot])
    return bank
