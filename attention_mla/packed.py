"""Weights of linear layers in the layout that oneDNN's bf16 matmuls read, packed once and kept.

Given a weight as checkpoints have it oneDNN rearranges it in every call, at the cost of reading it twice more: a matmul
of few rows then runs at a third of the memory's speed. What is packed is a copy, opaque and on the CPU only.

Letters: T tokens here, D inputs, N outputs, H heads, C latent rank, V value head size; in `PackedHeads` N is the query
size without rope.
"""

import torch
from torch import Tensor

from .weights import MlaWeights

__all__ = ["PackedHeads", "PackedLinear"]


class PackedLinear:
    """Packs each weight when it is first multiplied. Weights must not change afterwards."""

    def __init__(self) -> None:
        # The weight itself is kept beside its copy, so that nothing else can get its id.
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """[T, N] in bf16. T may be 0."""
        if id(weight_ND) not in self._packed:
            self._packed[id(weight_ND)] = weight_ND, _pack(weight_ND)
        if not x_TD.shape[0]:
            return x_TD.new_empty(0, weight_ND.shape[0])
        return _multiply(x_TD, self._packed[id(weight_ND)][1])


class PackedHeads:
    """Queries into latent space and means of latents out of it, head by head; packed like `PackedLinear`."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[MlaWeights, list[Tensor], list[Tensor]]] = {}

    def absorb(self, nope_RHN: Tensor, weights: MlaWeights) -> Tensor:
        """[R, H, C]: W_UK^T q. R is at least 1."""
        return _by_head(nope_RHN, self._of(weights)[1])

    def expand(self, mean_RHC: Tensor, weights: MlaWeights) -> Tensor:
        """[R, H, V]: W_UV c. R is at least 1."""
        return _by_head(mean_RHC, self._of(weights)[2])

    def _of(self, weights: MlaWeights) -> tuple[MlaWeights, list[Tensor], list[Tensor]]:
        if id(weights) not in self._packed:
            into = [_pack(w_NC.T.contiguous()) for w_NC in weights.w_uk_HNC]
            self._packed[id(weights)] = weights, into, [_pack(w_VC) for w_VC in weights.w_uv_HVC]
        return self._packed[id(weights)]


def _by_head(x_RHX: Tensor, packed_H: list[Tensor]) -> Tensor:
    return torch.stack([_multiply(x_RX, packed) for x_RX, packed in zip(x_RHX.unbind(1), packed_H, strict=True)], 1)


def _pack(weight_ND: Tensor) -> Tensor:
    assert weight_ND.dtype is torch.bfloat16, f"{weight_ND.dtype} where oneDNN packs bfloat16"
    return torch.ops.mkldnn._reorder_linear_weight(weight_ND, None)


def _multiply(x_TD: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")
