"""What an attention block computes on a device, behind one name: in torch, or in Triton's kernels (`triton_ops`).

Chosen once, at start. Knows no order of things: that is the layer's.

Letters: T tokens here, D model, C latent rank, P rope dim, H heads, V value head size, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .cache import LatentCache
from .config import MlaConfig
from .latent_rows import Latents
from .matrix import Matrix, Rows, plain
from .norm import rms_norm
from .packed import PackedHeads, PackedLinear
from .reference import Queries, absorbed_attention, naive_attention
from .rope import Rotation, rotate
from .triton_ops import TritonOps, import_kernels
from .view import PagedView
from .weights import HeadWeights, MlaWeights

__all__ = ["REFERENCE", "AttentionOps", "Latents", "TritonOps", "attention_ops", "interpreted"]


class AttentionOps(Protocol):
    """The parts of a block."""

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> Any:
        """What all layers of a step share; `attend` is given it. `dtype` is the run's."""
        ...

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
        """Norm and turn the latents and write them to the view's places; returns the queries' rope part, turned."""
        ...

    def attend(
        self,
        queries: Queries,
        weights: MlaWeights,
        *,
        plan: Any,
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        """Every token of the view over its own context, all read from the cache."""
        ...

    def linear(self, x: Rows, matrix: Matrix) -> Tensor:
        """[T, N] in the run dtype. Rows in fp8 are for a matrix in fp8."""
        ...

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, *, before: Matrix | None = None) -> Rows:
        """`norm.rms_norm`, as `linear` wants it for the matrix that follows."""
        ...

    def add_norm(
        self, x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float, *, before: Matrix | None = None
    ) -> tuple[Tensor, Rows]:
        """(x + update, its `norm`)."""
        ...


class ReferenceOps:
    """In torch, on any device. Its kernels come and go, and leave room by themselves."""

    def __init__(self, *, comm_sms: int = 0) -> None:
        pass

    def plan(self, view: PagedView, *, config: MlaConfig, dtype: torch.dtype) -> None:  # noqa: ARG002
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
        plan: None,  # noqa: ARG002
        config: MlaConfig,
        cache: LatentCache,
        layer: int,
        view: PagedView,
        out_THV: Tensor,
    ) -> None:
        over = {"latents": cache.rows(layer), "softmax_scale": config.softmax_scale}
        rows = view.decode
        if rows.num_rows:
            heads_RHV = absorbed_attention(queries.take(rows.tokens_R), self._heads(weights), rows=rows, **over)
            out_THV.index_copy_(0, rows.tokens_R, heads_RHV)
        for prompt in view.prompts:
            part = queries.part(prompt.tokens)
            out_THV[prompt.tokens] = naive_attention(part, weights, prompt=prompt, linear=self.linear, **over)

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

    def _heads(self, weights: MlaWeights) -> HeadWeights:
        return weights.heads


class OneDnnOps(ReferenceOps):
    """In torch on a CPU, in bf16, with weights in the layout that oneDNN's matmuls read."""

    def __init__(self, *, comm_sms: int = 0) -> None:
        super().__init__(comm_sms=comm_sms)
        self._linear, self._packed_heads = PackedLinear(), PackedHeads()

    def linear(self, x: Rows, matrix: Matrix) -> Tensor:
        return self._linear(plain(x), plain(matrix))

    def _heads(self, weights: MlaWeights) -> HeadWeights:
        return self._packed_heads(weights)


REFERENCE = ReferenceOps()
OPS: dict[str, Callable[..., AttentionOps]] = {"reference": ReferenceOps, "numba": OneDnnOps, "triton": TritonOps}


def attention_ops(name: str, *, comm_sms: int = 0) -> AttentionOps:
    """The ops of that name. ValueError if they need a package that is not installed.

    comm_sms   multiprocessors that kernels which stay on theirs to the end leave to exchanges
    """
    return OPS[name](comm_sms=comm_sms)


def interpreted() -> bool:
    """Whether kernels would run in Triton's interpreter. ValueError if Triton is not installed."""
    return import_kernels("e4m3_kernels").INTERPRETED
