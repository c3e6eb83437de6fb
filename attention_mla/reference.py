"""Attention over cached latents in plain torch, in its two algebraic forms side by side.

  naive      keys_h = [W_UK_h c | k_rope], values_h = W_UV_h c    many queries share the cost of up-projection: prompts
  absorbed   q_h . W_UK_h c = (W_UK_h^T q_h) . c                  one key [c | k_rope] serves all heads: decode

Both read latents by place, in pieces of bounded size, and merge the pieces in ascending order by log-sum-exp. Matmuls
with weights run in the run dtype; scores, softmax and sums over the context are taken in the wide dtype.
Knows nothing of projections from or to the hidden state, nor of who owns a page.
DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section 2.1, describes both forms.

Letters: T tokens here, R decode rows, H heads, S context positions, C latent rank, P rope dim, W = C + P,
N query/key head size without rope, V value head size, Q = N + P.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .latent_rows import LatentRows
from .norm import wide
from .splits import UNSEEN, DecodeRows, DecodeSplit
from .view import Prompt
from .weights import HeadWeights, MlaWeights

__all__ = ["Partial", "Queries", "absorbed_attention", "latent_attention", "merge", "naive_attention"]

TILE_BYTES = 2 << 20
"""Latents of decode rows that are widened at once: few enough to be in a CPU's cache still when they are multiplied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """What the tokens ask, in the run dtype; the rope part is rotated."""

    nope_THN: Tensor
    rope_THP: Tensor

    def take(self, tokens: Tensor) -> "Queries":
        """The queries of some tokens, by int64 index."""
        return Queries(nope_THN=self.nope_THN.index_select(0, tokens), rope_THP=self.rope_THP.index_select(0, tokens))

    def part(self, tokens: slice) -> "Queries":
        """The queries of consecutive tokens, without a copy."""
        return Queries(nope_THN=self.nope_THN[tokens], rope_THP=self.rope_THP[tokens])


class Partial(NamedTuple):
    """Attention over a piece of the context: the softmax-weighted mean, and the log of the sum of exponentials."""

    mean: Tensor
    """[..., X], wide dtype."""
    lse: Tensor
    """[...]."""


def merge(earlier: Partial, later: Partial) -> Partial:
    """Attention over both pieces together. Pieces are merged in ascending order of position, always."""
    lse = torch.logaddexp(earlier.lse, later.lse)
    share = (earlier.lse - lse).exp_().unsqueeze(-1)
    later_share = (later.lse - lse).exp_().unsqueeze(-1)
    return Partial(torch.addcmul(earlier.mean * share, later.mean, later_share), lse)


def absorbed_attention(
    queries: Queries, heads: HeadWeights, *, latents: LatentRows, rows: DecodeRows, softmax_scale: float
) -> Tensor:
    """Each row over its own context, in latent space; [R, H, V] in the run dtype.

    `queries` are the rows' in the order of `rows.tokens_R`; `latents` is one layer of the cache.
    """
    absorbed_HRC = torch.bmm(queries.nope_THN.transpose(0, 1), heads.w_uk_HNC)
    mean_RHC = latent_attention(
        absorbed_HRC.transpose(0, 1), queries.rope_THP, latents=latents, rows=rows, softmax_scale=softmax_scale
    )
    return torch.bmm(mean_RHC.transpose(0, 1), heads.w_uv_HCV).transpose(0, 1)


def latent_attention(
    absorbed_RHC: Tensor, rope_RHP: Tensor, *, latents: LatentRows, rows: DecodeRows, softmax_scale: float
) -> Tensor:
    """The softmax-weighted mean of the latents that each row sees [R, H, C], in the run dtype."""
    query_RHW = torch.cat((absorbed_RHC, rope_RHP), dim=-1)
    query_RHW = query_RHW.to(wide(query_RHW.dtype)) * softmax_scale
    rank = absorbed_RHC.shape[-1]

    merged = _absorbed_split(query_RHW, latents, rows, 0, rank)
    for number in range(1, len(rows.splits)):
        later = _absorbed_split(query_RHW, latents, rows, number, rank)
        reaching = rows.splits[number].num_rows
        longer = merge(Partial(merged.mean[:reaching], merged.lse[:reaching]), later)
        merged.mean[:reaching] = longer.mean
        merged.lse[:reaching] = longer.lse
    return merged.mean.to(latents.dtype)


def _absorbed_split(query_RHW: Tensor, latents: LatentRows, rows: DecodeRows, number: int, rank: int) -> Partial:
    split = rows.splits[number]
    row_bytes = split.num_positions * query_RHW.shape[2] * query_RHW.dtype.itemsize
    some = max(1, TILE_BYTES // row_bytes)
    tiles = [range(first, min(first + some, split.num_rows)) for first in range(0, split.num_rows, some)]
    parts = [_absorbed_tile(query_RHW, latents, rows, split, tile, rank) for tile in tiles]
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([part.mean for part in parts]), torch.cat([part.lse for part in parts]))


def _absorbed_tile(
    query_RHW: Tensor, latents: LatentRows, rows: DecodeRows, split: DecodeSplit, tile: range, rank: int
) -> Partial:
    """Some consecutive rows over one split of their context."""
    num_blocks = split.blocks.shape[0] // split.num_rows
    blocks = split.blocks[tile.start * num_blocks : tile.stop * num_blocks]
    latents_RSW = latents.take_blocks(blocks, rows.block_size).view(len(tile), -1, query_RHW.shape[2])
    latents_RSW = latents_RSW[:, : split.num_positions].to(query_RHW.dtype)
    unseen_E1S = split.unseen_in(tile)
    if unseen_E1S is not None and rows.see_each_other:  # a wrong draft's NaN would count even with a share of 0
        latents_RSW[-unseen_E1S.shape[0] :].masked_fill_(unseen_E1S.transpose(1, 2), 0)
    scores_RHS = torch.bmm(query_RHW[tile.start : tile.stop], latents_RSW.transpose(1, 2))
    if unseen_E1S is not None:
        scores_RHS[-unseen_E1S.shape[0] :].masked_fill_(unseen_E1S, UNSEEN)
    return _softmax_mean(scores_RHS, latents_RSW[..., :rank])


def naive_attention(
    queries: Queries,
    weights: MlaWeights,
    *,
    latents: LatentRows,
    prompt: Prompt,
    softmax_scale: float,
) -> Tensor:
    """A prompt's tokens over their context and themselves, all read back from the cache; [T, H, V] in the run dtype.

    `queries` are the prompt's tokens only; `latents` is one layer of the cache.
    """
    query_HTQ = torch.cat((queries.nope_THN, queries.rope_THP), dim=-1).transpose(0, 1)
    query_HTQ = query_HTQ.to(wide(query_HTQ.dtype)) * softmax_scale
    blocks = query_HTQ.split(prompt.block, dim=1)

    merged: list[Partial] = []
    for chunk in prompt.chunks:
        keys_HQS, values_HSV = _up_project(latents.take(chunk.places_S), weights)
        for number, bias_TS in enumerate(chunk.biases, start=chunk.first_block):
            scores_HTS = torch.bmm(blocks[number], keys_HQS)
            if bias_TS is not None:
                scores_HTS += bias_TS
            part = _softmax_mean(scores_HTS, values_HSV)
            if len(merged) < len(blocks):  # the first chunk, which every block sees
                merged.append(part)
            else:
                merged[number] = merge(merged[number], part)
    return torch.cat([part.mean for part in merged], dim=1).transpose(0, 1).to(latents.dtype)


def _up_project(latents_SW: Tensor, weights: MlaWeights) -> tuple[Tensor, Tensor]:
    """Keys [H, Q, S] and values [H, S, V] of some positions, wide."""
    heads, nope, rank = weights.w_uk_HNC.shape
    up_SHU = functional.linear(latents_SW[:, :rank], weights.kv_b_UC).unflatten(-1, (heads, -1))
    rope_SHP = latents_SW[:, None, rank:].expand(-1, heads, -1)
    keys_SHQ = torch.cat((up_SHU[..., :nope], rope_SHP), dim=-1)
    dtype = wide(latents_SW.dtype)
    return keys_SHQ.to(dtype).permute(1, 2, 0), up_SHU[..., nope:].to(dtype).transpose(0, 1)


def _softmax_mean(scores: Tensor, values: Tensor) -> Partial:
    """scores [batch, queries, S], values [batch, S, X]."""
    shares = scores.softmax(dim=-1)
    # The largest share is 1 / sum(exp(score - largest score)).
    lse = scores.amax(dim=-1) - shares.amax(dim=-1).log()
    return Partial(torch.bmm(shares, values), lse)
