"""A prompt's attention through torch's own flash attention: keys and values up-projected, piece by piece.

The same as `reference.naive_attention`, in the run dtype where that is wide; pieces are merged in ascending order by
log-sum-exp. Pieces are cut so that each either lies before all queries or has its diagonal in a square:

    positions 900 .. 1400, context 1400, pieces of 256     keys     [0 .. 256) [256 .. 512) [512 .. 768) [768 .. 900)
                                                                    seen by all queries, no mask
                                                           keys     [900 .. 1156)
                                                                    seen by [900 .. 1156) causally, by later ones whole

Never run on a GPU yet. Knows latents by place; does not know whose they are.

Letters: T tokens here, S positions of one piece, H heads, C latent rank, N query/key head size without rope, P rope
dim, Q = N + P, V value head size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .latent_rows import LatentRows
from .norm import wide
from .reference import Partial, Queries, merge, naive_attention
from .view import Prompt
from .weights import MlaWeights

__all__ = ["flash_attention"]

PIECE = 1024
"""Positions that are up-projected at once: at 128 heads of 192 and 128 some 84 MB of keys and values."""
_NARROW = (torch.bfloat16, torch.float16)
_DTYPES = {"cuda": _NARROW, "cpu": (*_NARROW, torch.float32)}
"""What torch has flash attention for."""


def flash_attention(
    queries: Queries, weights: MlaWeights, *, latents: LatentRows, prompt: Prompt, softmax_scale: float
) -> Tensor:
    """A prompt's tokens over their context and themselves, all read back from the cache; [T, H, V] in the run dtype.

    `queries` are the prompt's tokens only; `latents` is one layer of the cache. What torch has no flash
    attention for goes through `naive_attention`.
    """
    if latents.dtype not in _DTYPES.get(latents.stored_NX.device.type, ()):
        return naive_attention(queries, weights, latents=latents, prompt=prompt, softmax_scale=softmax_scale)
    query_HTQ = torch.cat((queries.nope_THN, queries.rope_THP), dim=-1).transpose(0, 1)
    places = torch.cat([chunk.places_S for chunk in prompt.chunks])
    start = len(places) - query_HTQ.shape[1]
    merged: Partial | None = None
    for piece in _pieces(start, len(places)):
        keys_HSQ, values_HSQ = _up_project(latents.take(places[piece.start : piece.stop]), weights)
        first = max(piece.start - start, 0)
        later = _piece(query_HTQ[:, first:], keys_HSQ, values_HSQ, causal=piece.start >= start, scale=softmax_scale)
        if merged is None:
            merged = later
            continue
        longer = merge(Partial(merged.mean[:, first:], merged.lse[:, first:]), later)
        merged.mean[:, first:] = longer.mean
        merged.lse[:, first:] = longer.lse
    assert merged is not None, "a prompt has tokens"
    return merged.mean[..., : weights.w_uv_HVC.shape[1]].transpose(0, 1).to(latents.dtype)


def _pieces(start: int, context: int) -> list[range]:
    """Both sides of `start` in pieces of PIECE: (3, 6) in pieces of 2 gives 0..2, 2..3, 3..5, 5..6."""
    earlier = [range(begin, min(begin + PIECE, start)) for begin in range(0, start, PIECE)]
    return earlier + [range(begin, min(begin + PIECE, context)) for begin in range(start, context, PIECE)]


def _piece(query_HTQ: Tensor, keys_HSQ: Tensor, values_HSQ: Tensor, *, causal: bool, scale: float) -> Partial:
    """Queries over one piece; with `causal` the first S of them stand where the keys do, and the others behind."""
    if not causal:
        return _flash(query_HTQ, keys_HSQ, values_HSQ, causal=False, scale=scale)
    size = keys_HSQ.shape[1]
    square = _flash(query_HTQ[:, :size], keys_HSQ, values_HSQ, causal=True, scale=scale)
    if query_HTQ.shape[1] == size:
        return square
    below = _flash(query_HTQ[:, size:], keys_HSQ, values_HSQ, causal=False, scale=scale)
    return Partial(torch.cat((square.mean, below.mean), dim=1), torch.cat((square.lse, below.lse), dim=1))


def _flash(query_HTQ: Tensor, keys_HSQ: Tensor, values_HSQ: Tensor, *, causal: bool, scale: float) -> Partial:
    given = (query_HTQ.unsqueeze(0), keys_HSQ.unsqueeze(0), values_HSQ.unsqueeze(0))
    if query_HTQ.device.type == "cuda":
        mean, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, causal, scale=scale)
    else:
        mean, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=scale)
    dtype = wide(query_HTQ.dtype)
    return Partial(mean.squeeze(0).to(dtype), lse.squeeze(0).to(dtype))


def _up_project(latents_SW: Tensor, weights: MlaWeights) -> tuple[Tensor, Tensor]:
    """Keys and values of some positions, both [H, S, Q]: flash attention wants one size, so values end in zeros."""
    heads, nope, rank = weights.w_uk_HNC.shape
    up_SHU = functional.linear(latents_SW[:, :rank], weights.kv_b_UC).unflatten(-1, (heads, -1))
    rope_SHP = latents_SW[:, None, rank:].expand(-1, heads, -1)
    keys_SHQ = torch.cat((up_SHU[..., :nope], rope_SHP), dim=-1)
    values_SHV = up_SHU[..., nope:]
    missing = keys_SHQ.shape[-1] - values_SHV.shape[-1]
    assert missing >= 0, f"values of {values_SHV.shape[-1]}, keys of {keys_SHQ.shape[-1]}"
    return keys_SHQ.transpose(0, 1), functional.pad(values_SHV, (0, missing)).transpose(0, 1)
