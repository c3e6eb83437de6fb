"""What a token takes while its layers are computed, one layer at a time: plain arithmetic, an upper estimate.

residual stream, in both formats | the widest of attention, a dense MLP, and the experts
"""

from __future__ import annotations

from typing import NamedTuple

from ..model.model_config import ModelConfig


class NumberBytes(NamedTuple):
    """Sizes of numbers: of the run, and of where a run is never narrower than float32."""

    run: int
    wide: int


def own_bytes(model: ModelConfig, sizes: NumberBytes) -> int:
    """Without routed experts, which compute rows that land, whoever sent them: for whoever counts those."""
    return _bytes_around(max(_attention_or_mlp(model), _shared(model)), model, sizes)


def whole_bytes(model: ModelConfig, sizes: NumberBytes) -> int:
    """With them, as if each rank computed the experts of its own tokens."""
    moe, hidden = model.moe, model.hidden_size
    routed = moe.top_k * (2 * hidden + 3 * moe.intermediate_size) if moe is not None else 0
    return _bytes_around(max(_attention_or_mlp(model), _shared(model) + routed), model, sizes)


def _bytes_around(widest: int, model: ModelConfig, sizes: NumberBytes) -> int:
    hidden = model.hidden_size
    return (3 * hidden + widest) * sizes.run + hidden * sizes.wide


def _attention_or_mlp(model: ModelConfig) -> int:
    mla = model.mla
    attention = mla.num_heads * (2 * mla.qk_head_dim + 2 * mla.v_head_dim) + (mla.q_lora_rank or 0) + mla.latent_width
    return max(attention, 3 * model.dense_intermediate_size if model.num_dense_layers else 0)


def _shared(model: ModelConfig) -> int:
    return 3 * model.moe.shared_intermediate_size if model.moe is not None else 0
