"""Weights in the layout that oneDNN's bf16 matmuls read, packed once and kept.

Given a weight as checkpoints have it oneDNN rearranges it in every call, at the cost of reading it twice more: a matmul
of few rows then runs at a third of the memory's speed. What is packed is a copy, opaque and on the CPU only.

Letters: T tokens here, D inputs, N outputs; heads' weights as in `weights`.
"""

import torch
from torch import Tensor

from .weights import HeadWeights, MlaWeights

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
    """Heads one after the other: as they lie in a checkpoint, every batched matmul copies them first. At one row,
    8 heads of 512 x 128 out of memory take 0.1 ms so, and 0.6 ms otherwise."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[MlaWeights, HeadWeights]] = {}

    def __call__(self, weights: MlaWeights) -> HeadWeights:
        """Weights must not change afterwards."""
        if id(weights) not in self._packed:
            w_uk_HNC, w_uv_HCV = weights.heads
            self._packed[id(weights)] = weights, HeadWeights(w_uk_HNC.contiguous(), w_uv_HCV.contiguous())
        return self._packed[id(weights)][1]


def _pack(weight_ND: Tensor) -> Tensor:
    assert weight_ND.dtype is torch.bfloat16, f"{weight_ND.dtype} where oneDNN packs bfloat16"
    return torch.ops.mkldnn._reorder_linear_weight(weight_ND, None)


def _multiply(x_TD: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")
