"""One MLA block: hidden states in, hidden states out, with the latents kept in the cache.

`attend` is `project` followed by `core`; whoever overlaps something with attention calls the two halves.
The step's own tokens are appended first and read back from the cache like all others, so how a prompt was cut changes
nothing. Knows nothing of requests, residuals or other ranks.

Letters: T tokens here, D model, H heads, C latent rank, P rope dim, W = C + P, N query/key head size without rope,
V value head size.
"""

from typing import Any

from torch import Tensor

from .cache import LatentCache
from .config import MlaConfig
from .matrix import Rows, num_rows
from .ops import REFERENCE, AttentionOps, Latents
from .reference import Queries
from .rope import Rotation
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
    ops: AttentionOps = REFERENCE,
) -> Tensor:
    """The block's output [T, D] for the tokens of `view`, in x's dtype; their latents are in `cache` afterwards.

    `rotation` is `angles(config.rope, config.qk_rope_head_dim, view.positions_T, x_TD.dtype)`, once a step for all
    layers. x, weights and cache share one dtype and device. T may be 0.
    """
    where = {"config": config, "cache": cache, "layer": layer, "view": view, "ops": ops}
    queries = project(x_TD, weights, rotation=rotation, **where)
    plan = ops.plan(view, config=config, dtype=x_TD.dtype)
    return core(queries, weights, plan=plan, **where)


def project(
    x_TD: Rows,
    weights: MlaWeights,
    *,
    config: MlaConfig,
    cache: LatentCache,
    layer: int,
    view: PagedView,
    rotation: Rotation,
    ops: AttentionOps = REFERENCE,
) -> Queries:
    """The first half: the tokens' queries, with their latents appended to the cache. x is what `ops.norm` leaves."""
    assert num_rows(x_TD) == view.num_tokens, f"{num_rows(x_TD)} hidden states for {view.num_tokens} tokens"
    down_TX = ops.linear(x_TD, weights.down_XD)
    query_TX = down_TX[:, : -config.latent_width]
    latent_TC, rope_TP = down_TX[:, -config.latent_width :].split(
        (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
    )
    if weights.q_norm_A is not None and weights.q_b is not None:
        normed = ops.norm(query_TX, weights.q_norm_A, config.latent_norm_eps, before=weights.q_b)
        query_TX = ops.linear(normed, weights.q_b)
    query_THQ = query_TX.unflatten(-1, (config.num_heads, config.qk_head_dim))
    nope_THN, rope_THP = query_THQ.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    turned_THP = ops.append(
        Latents(latent_TC=latent_TC, rope_TP=rope_TP),
        rope_THP,
        weights.latent_norm_C,
        config=config,
        rotation=rotation,
        cache=cache,
        layer=layer,
        view=view,
    )
    return Queries(nope_THN=nope_THN, rope_THP=turned_THP)


def core(
    queries: Queries,
    weights: MlaWeights,
    *,
    config: MlaConfig,
    cache: LatentCache,
    layer: int,
    view: PagedView,
    ops: AttentionOps = REFERENCE,
    plan: Any = None,
) -> Tensor:
    """The second half: attention over the cache and the output projection; [T, D]. `plan` is what `ops.plan` gave."""
    heads_THV = queries.nope_THN.new_empty(view.num_tokens, config.num_heads, config.v_head_dim)
    ops.attend(queries, weights, plan=plan, config=config, cache=cache, layer=layer, view=view, out_THV=heads_THV)
    return ops.linear(heads_THV.flatten(1), weights.o_DU)
