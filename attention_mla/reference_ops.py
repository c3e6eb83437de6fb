"""What an attention block computes, in torch, on any device (see `ops`)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .cache import LatentCache
from .config import MlaConfig
from .latent_rows import Latents
from .matrix import Matrix, Rows, plain
from .norm import rms_norm
from .reference import Queries, absorbed_attention, naive_attention
from .rope import Rotation, rotate
from .view import PagedView
from .weights import MlaWeights

__all__ = ["ReferenceOps"]


class ReferenceOps:
    """In torch, on any device. Its kernels come and go, and leave room by themselves."""

    def __init__(self, *, comm_sms: int = 0) -> None:
        pass

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> Any:  # noqa: ARG002
        return None

    def append(
        self,
        latents: Latents,
        rope_THP: Tensor,
        norm_C: Tensor,
        *,
        config: MlaConfig,
        rotation: Rotation,
        cache: LatentCache,
        layer: int,
        view: PagedView,
    ) -> Tensor:
        interleaved = config.rope.interleaved
        latent_TC = rms_norm(latents.latent_TC, norm_C, config.latent_norm_eps)
        cache.clear(layer, view.cleared_J)
        cache.append(
            layer, torch.cat((latent_TC, rotate(latents.rope_TP, rotation, interleaved)), dim=-1), view.places_T
        )
        return rotate(rope_THP, rotation, interleaved)

    def attend(
        self,
        queries: Queries,
        weights: MlaWeights,
        *,
        plan: Any,  # noqa: ARG002
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        over = {"latents": cache.rows(layer), "softmax_scale": config.softmax_scale}
        rows = view.decode
        if rows.num_rows:
            heads_RHV = absorbed_attention(queries.take(rows.tokens_R), weights.heads, rows=rows, **over)
            out_THV.index_copy_(0, rows.tokens_R, heads_RHV)
        for prompt in view.prompts:
            part = queries.part(prompt.tokens)
            out_THV[prompt.tokens] = naive_attention(part, weights, prompt=prompt, **over)

    def linear(self, x: Rows, matrix: Matrix) -> Tensor:
        return functional.linear(plain(x), plain(matrix))

    def norm(
        self,
        x_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        *,
        before: Matrix | None = None,  # noqa: ARG002
    ) -> Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def add_norm(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        *,
        before: Matrix | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        sum_TD = x_TD if update_TD is None else x_TD + update_TD
        return sum_TD, rms_norm(sum_TD, weight_D, eps)
