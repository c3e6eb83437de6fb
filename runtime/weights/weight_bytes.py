"""Bytes of the weights of one rank, by part: arithmetic from a model's shapes, exact.

What a file has in fp8 counts a byte a number and its scales where it is kept so. Knows no file: it takes the model's
word that its linear layers are in fp8.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial

from attention_mla import fp8_names, mla_shapes
from moe import expert_shapes, mlp_shapes, router_shapes, shared_shapes
from moe.quant import num_blocks

from ..model.model_config import ModelConfig
from ..model.model_shapes import Shape, total

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of the weights of the rank that holds most, by part."""

    experts: int
    shared: int
    dense: int
    attention: int
    router: int
    norms: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        """All parts."""
        alike = self.shared + self.dense + self.attention + self.router + self.norms + self.embedding + self.head
        return self.experts + alike


def weight_bytes(
    model: ModelConfig, *, slots: int, dtype_bytes: int, keep_fp8: bool, keep_shared_fp8: bool
) -> WeightBytes:
    """Of a rank with so many slots a layer; see `memory.MemoryNumbers`."""
    hidden, moe, num_moe = model.hidden_size, model.moe, len(model.moe_layers)
    size, wide = dtype_bytes, max(dtype_bytes, 4)
    embedding = model.vocab_size * hidden
    keeps = keep_shared_fp8 and model.quantization is not None
    shared_bytes = partial(_stored_bytes, dtype_bytes=size, keep_fp8=keeps)
    shares_head = model.tie_word_embeddings and wide == size
    return WeightBytes(
        experts=num_moe * slots * expert_bytes(model, dtype_bytes=size, keep_fp8=keep_fp8),
        shared=num_moe * shared_bytes(shared_shapes(moe)) if moe is not None else 0,
        dense=model.num_dense_layers * shared_bytes(mlp_shapes(hidden, model.dense_intermediate_size)),
        attention=model.num_layers * shared_bytes(mla_shapes(model.mla), may_be_fp8=fp8_names(model.mla)),
        router=num_moe * total(router_shapes(moe)) * wide if moe is not None else 0,
        norms=(2 * model.num_layers + 1) * hidden * size,
        embedding=embedding * size,
        head=0 if shares_head else embedding * wide,
    )


def expert_bytes(model: ModelConfig, *, dtype_bytes: int, keep_fp8: bool) -> int:
    """Bytes of one routed expert; with `keep_fp8`, if the model's file says fp8, a byte a weight and its scales."""
    if model.moe is None:
        return 0
    keeps = keep_fp8 and model.quantization is not None
    return _stored_bytes(expert_shapes(model.moe), dtype_bytes=dtype_bytes, keep_fp8=keeps)


def _stored_bytes(
    shapes: Mapping[str, Shape], *, dtype_bytes: int, keep_fp8: bool, may_be_fp8: Container[str] | None = None
) -> int:
    """Bytes of some tensors; with `keep_fp8` those of them that may be (None: all) take a byte each, and scales."""
    return sum(
        math.prod(shape) + math.prod(num_blocks(size) for size in shape) * _SCALE_BYTES
        if keep_fp8 and (may_be_fp8 is None or name in may_be_fp8)
        else math.prod(shape) * dtype_bytes
        for name, shape in shapes.items()
    )
