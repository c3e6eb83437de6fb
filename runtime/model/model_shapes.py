"""Every tensor of a model by its Hugging Face name, with its shape; and from the shapes, exact parameter counts.

Knows names and sizes only: no files, no ranks, no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attention_mla import mla_shapes
from moe import expert_shapes, mlp_shapes, router_shapes, shared_shapes

from .model_config import ModelConfig

Shape = tuple[int, ...]
EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of the whole model by part; block scales and the copies that tying saves are not counted.

    `mtp` is the layers for multi-token prediction with the embedding and head that their files repeat; `main` is
    without them. `active` is what one token is multiplied with: no embedding, top-k of the experts.
    """

    embedding: int
    head: int
    norms: int
    attention: int
    dense: int
    router: int
    shared: int
    experts: int
    mtp: int
    experts_active: int

    @property
    def main(self) -> int:
        """The model without its layers for multi-token prediction."""
        return self.embedding + self.active - self.experts_active + self.experts

    @property
    def active(self) -> int:
        """Attention, dense and shared MLPs, routers, norms, head, and top-k of the experts."""
        parts = (self.head, self.norms, self.attention, self.dense, self.router, self.shared)
        return sum(parts) + self.experts_active


def shared_tensors(model: ModelConfig) -> dict[str, Shape]:
    """What every rank holds: all but the routed experts. A tied model has no head of its own."""
    shapes: dict[str, Shape] = {EMBED: (model.vocab_size, model.hidden_size), NORM: (model.hidden_size,)}
    if not model.tie_word_embeddings:
        shapes[HEAD] = (model.vocab_size, model.hidden_size)
    for layer in range(model.num_layers):
        shapes |= layer_tensors(model, layer)
    return shapes


def layer_tensors(model: ModelConfig, layer: int) -> dict[str, Shape]:
    """One layer without its routed experts; a layer past the last is one for multi-token prediction."""
    prefix, hidden = layer_prefix(layer), (model.hidden_size,)
    shapes = {f"{prefix}input_layernorm.weight": hidden, f"{prefix}post_attention_layernorm.weight": hidden}
    shapes |= _under(f"{prefix}self_attn.", mla_shapes(model.mla))
    if model.moe is not None and layer >= model.num_dense_layers:
        return shapes | _under(f"{prefix}mlp.", router_shapes(model.moe) | shared_shapes(model.moe))
    return shapes | _under(f"{prefix}mlp.", mlp_shapes(model.hidden_size, model.dense_intermediate_size))


def expert_tensors(model: ModelConfig, layer: int, expert: int) -> dict[str, Shape]:
    """One routed expert of one layer."""
    assert model.moe is not None, "a dense model has no experts"
    return _under(expert_prefix(layer, expert), expert_shapes(model.moe))


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """What the names of an expert's tensors begin with."""
    return f"{layer_prefix(layer)}mlp.experts.{expert}."


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Exact counts, from the shapes."""
    hidden, moe, num_moe = model.hidden_size, model.moe, len(model.moe_layers)
    embedding = model.vocab_size * hidden
    expert = total(expert_shapes(moe)) if moe is not None else 0
    return ParameterCounts(
        embedding=embedding,
        head=0 if model.tie_word_embeddings else embedding,
        norms=(2 * model.num_layers + 1) * hidden,
        attention=model.num_layers * total(mla_shapes(model.mla)),
        dense=model.num_dense_layers * total(mlp_shapes(hidden, model.dense_intermediate_size)),
        router=num_moe * total(router_shapes(moe)) if moe is not None else 0,
        shared=num_moe * total(shared_shapes(moe)) if moe is not None else 0,
        experts=num_moe * expert * moe.num_experts if moe is not None else 0,
        experts_active=num_moe * expert * moe.top_k if moe is not None else 0,
        mtp=model.num_mtp_layers * _mtp_layer_count(model, expert),
    )


def total(shapes: Mapping[str, Shape]) -> int:
    """Numbers in all these tensors together."""
    return sum(math.prod(shape) for shape in shapes.values())


def _mtp_layer_count(model: ModelConfig, expert: int) -> int:
    """A decoder layer with its experts, eh_proj, the norms enorm, hnorm and shared_head.norm, embedding and head."""
    hidden, num_experts = model.hidden_size, model.moe.num_experts if model.moe is not None else 0
    layer = total(layer_tensors(model, model.num_layers)) + num_experts * expert
    return layer + 2 * hidden * hidden + 3 * hidden + 2 * model.vocab_size * hidden


def _under(prefix: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}
