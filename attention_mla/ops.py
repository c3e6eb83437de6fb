"""What an attention block computes on a device, behind one name: in torch (`reference_ops`), in Numba's kernels on a
CPU (`numba_ops`), or in Triton's (`triton_ops`).

Chosen once, at start. Knows no order of things: that is the layer's.

Letters: T tokens here, D model, C latent rank, P rope dim, H heads, V value head size, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ep.ops import import_kernels

from .cache import LatentCache
from .config import MlaConfig
from .latent_rows import Latents
from .matrix import Matrix, Rows
from .reference import Queries
from .reference_ops import ReferenceOps
from .rope import Rotation
from .triton_ops import TritonOps
from .view import PagedView
from .weights import MlaWeights

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


REFERENCE = ReferenceOps()


def _numba_ops(*, comm_sms: int) -> AttentionOps:
    return import_kernels(".numba_ops", __package__).NumbaOps(comm_sms=comm_sms)


OPS: dict[str, Callable[..., AttentionOps]] = {"reference": ReferenceOps, "numba": _numba_ops, "triton": TritonOps}


def attention_ops(name: str, *, comm_sms: int = 0) -> AttentionOps:
    """The ops of that name. ValueError if they need a package that is not installed.

    comm_sms   multiprocessors that kernels which stay on theirs to the end leave to exchanges
    """
    return OPS[name](comm_sms=comm_sms)


def interpreted() -> bool:
    """Whether kernels would run in Triton's interpreter. ValueError if Triton is not installed."""
    return import_kernels(".e4m3_kernels", __package__).INTERPRETED
