"""The whole model as one plain function of a text: no cache, no pages, no chunks, no ranks, no exchange.

Every position is computed from all before it, with keys and values up-projected for every token (naive attention) and
experts as a loop. It is what the step loop must equal, in float64 to the last digits; far too slow to serve.

Shapes: T tokens, D model, H heads, C latent rank, P rope dim, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_mla import MlaConfig, MlaWeights, Rotation, angles, plain, rms_norm, rotate
from moe.reference import dense_moe

from ..model.model_config import ModelConfig
from ..weights.weights import DecoderWeights


def reference_logits(model: ModelConfig, weights: DecoderWeights, tokens_T: Tensor) -> Tensor:
    """[T, V] logits after each token, in the head's dtype. `weights` are those of a single rank: all experts."""
    x_TD = weights.embed_VD[tokens_T]
    positions_T = torch.arange(len(tokens_T))
    rotation = angles(model.mla.rope, model.mla.qk_rope_head_dim, positions_T, x_TD.dtype)
    for layer in weights.layers:
        h_TD = rms_norm(x_TD, layer.input_norm_D, model.rms_norm_eps)
        x_TD = x_TD + reference_attention(h_TD, layer.attention, model.mla, rotation)
        h_TD = rms_norm(x_TD, layer.post_norm_D, model.rms_norm_eps)
        if layer.dense is not None:
            x_TD = x_TD + layer.dense(h_TD)
        else:
            assert layer.moe is not None, "a layer is dense or has experts"
            assert model.moe is not None, "a layer has experts that the model does not know of"
            x_TD = x_TD + dense_moe(h_TD, layer.moe, model.moe)
    h_TD = rms_norm(x_TD, weights.norm_D, model.rms_norm_eps)
    return linear(h_TD.to(weights.head_VD.dtype), weights.head_VD)


def reference_attention(x_TD: Tensor, weights: MlaWeights, config: MlaConfig, rotation: Rotation) -> Tensor:
    """[T, D]: causal attention, one head after the other. The formula: "DeepSeek-V2", section 2.1."""
    nope, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    reads_TX = linear(x_TD, plain(weights.down_XD))
    query_TA, latent_TC, key_rope_TP = reads_TX.split((reads_TX.shape[1] - latent - rope, latent, rope), dim=1)
    if weights.q_b is not None and weights.q_norm_A is not None:
        query_TA = linear(rms_norm(query_TA, weights.q_norm_A, config.latent_norm_eps), plain(weights.q_b))
    latent_TC = rms_norm(latent_TC, weights.latent_norm_C, config.latent_norm_eps)
    key_rope_TP = rotate(key_rope_TP.unsqueeze(1), rotation, config.rope.interleaved).squeeze(1)
    future_TT = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).triu(1)
    heads = []
    for head, query_TQ in enumerate(query_TA.unflatten(1, (config.num_heads, nope + rope)).unbind(1)):
        query_rope_TP = rotate(query_TQ[:, nope:].unsqueeze(1), rotation, config.rope.interleaved).squeeze(1)
        key_TN, value_TV = latent_TC @ weights.w_uk_HNC[head].T, latent_TC @ weights.w_uv_HVC[head].T
        scores_TT = query_TQ[:, :nope] @ key_TN.T + query_rope_TP @ key_rope_TP.T
        scores_TT = (scores_TT * config.softmax_scale).masked_fill(future_TT, -torch.inf)
        heads.append(scores_TT.softmax(dim=1) @ value_TV)
    return linear(torch.cat(heads, dim=1), plain(weights.o_DU))
