"""One MLA block: hidden states in, hidden states out, with the latents kept in the cache.

`attend` is `project` followed by `core`; whoever overlaps something with attention calls the two halves.
The step's own tokens are appended first and read back from the cache like all others, so how a prompt was cut changes
nothing. Knows nothing of requests, residuals or other ranks.

Letters: T tokens here, D model, H heads, C latent rank, P rope dim, W = C + P, N query/key head size without rope,
V value head size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .cache import LatentCache
from .config import MlaConfig
from .norm import rms_norm
from .reference import Queries, absorbed_attention, naive_attention
from .rope import Rotation, rotate
from .view import PagedView
from .weights import MlaWeights

__all__ = ["attend", "core", "project"]


def attend(
    x_TD: Tensor,
    weights: MlaWeights,
    *,
    config: MlaConfig,
    cache: LatentCache,
    layer: int,
    view: PagedView,
    rotation: Rotation,
) -> Tensor:
    """The block's output [T, D] for the tokens of `view`, in x's dtype; their latents are in `cache` afterwards.

    `rotation` is `angles(config.rope, config.qk_rope_head_dim, view.positions_T, x_TD.dtype)`, once a step for all
    layers. x, weights and cache share one dtype and device. T may be 0.
    """
    queries = project(x_TD, weights, config=config, cache=cache, layer=layer, view=view, rotation=rotation)
    return core(queries, weights, config=config, cache=cache, layer=layer, view=view)


def project(
    x_TD: Tensor,
    weights: MlaWeights,
    *,
    config: MlaConfig,
    cache: LatentCache,
    layer: int,
    view: PagedView,
    rotation: Rotation,
) -> Queries:
    """The first half: the tokens' queries, with their latents appended to the cache."""
    assert x_TD.shape[0] == view.num_tokens, f"{x_TD.shape[0]} hidden states for {view.num_tokens} tokens"
    eps, interleaved = config.latent_norm_eps, config.rope.interleaved
    down_TX = functional.linear(x_TD, weights.down_XD)
    query_TX = down_TX[:, : -config.latent_width]
    latent_TC, rope_TP = down_TX[:, -config.latent_width :].split(
        (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
    )

    latents_TW = torch.cat(
        (rms_norm(latent_TC, weights.latent_norm_C, eps), rotate(rope_TP, rotation, interleaved)), dim=-1
    )
    cache.append(layer, latents_TW, view.places_T)

    if weights.q_norm_A is not None and weights.q_b is not None:
        query_TX = functional.linear(rms_norm(query_TX, weights.q_norm_A, eps), weights.q_b)
    query_THQ = query_TX.unflatten(-1, (config.num_heads, config.qk_head_dim))
    nope_THN, rope_THP = query_THQ.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    return Queries(nope_THN=nope_THN, rope_THP=rotate(rope_THP, rotation, interleaved))


def core(
    queries: Queries, weights: MlaWeights, *, config: MlaConfig, cache: LatentCache, layer: int, view: PagedView
) -> Tensor:
    """The second half: attention over the cache and the output projection; [T, D]."""
    latents_NW, scale = cache.rows(layer), config.softmax_scale
    heads_THV = queries.nope_THN.new_empty(view.num_tokens, config.num_heads, config.v_head_dim)
    rows = view.decode
    if rows.num_rows:
        row_queries = queries.take(rows.tokens_R)
        heads_RHV = absorbed_attention(row_queries, weights, latents_NW=latents_NW, rows=rows, softmax_scale=scale)
        heads_THV.index_copy_(0, rows.tokens_R, heads_RHV)
    for prompt in view.prompts:
        heads_THV[prompt.tokens] = naive_attention(
            queries.part(prompt.tokens), weights, latents_NW=latents_NW, prompt=prompt, softmax_scale=scale
        )
    return functional.linear(heads_THV.flatten(1), weights.o_DU)
