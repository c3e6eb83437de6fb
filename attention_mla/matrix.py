"""A linear layer's weight and the rows that it is multiplied with, each plain or in fp8 (e4m3) with float32 scales.

    weight   a scale for each 128 x 128 block, as checkpoints have them (`weight_scale_inv`)
    rows     a scale for each row and 128 columns, made while it runs

A scale takes the stored value back. The last block of a side may be partial. Knows how they are kept; who multiplies
them is the `ops`.

Letters: T tokens here, D inputs, N outputs, G = ceil(D / 128) and Q = ceil(N / 128) blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "Fp8Matrix", "Fp8Rows", "Matrix", "Rows", "linear_blocks", "num_blocks", "num_rows", "plain"]

BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Matrix:
    """A weight as the checkpoint has it."""

    values_ND: Tensor
    scales_QG: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Rows:
    """Rows ready to be multiplied with an `Fp8Matrix`; the product is in `dtype`, which is the run's."""

    values_TD: Tensor
    scales_TG: Tensor
    dtype: torch.dtype


Matrix = Tensor | Fp8Matrix
"""[N, D]"""
Rows = Tensor | Fp8Rows
"""[T, D]"""


def num_blocks(size: int) -> int:
    """Blocks that cover a side, the last one possibly partial."""
    return -(-size // BLOCK)


def num_rows(rows: Rows) -> int:
    """T."""
    return (rows.values_TD if isinstance(rows, Fp8Rows) else rows).shape[0]


def plain(either: Tensor | Fp8Matrix | Fp8Rows) -> Tensor:
    """A matrix or rows of which the caller knows that they are not in fp8."""
    assert isinstance(either, Tensor), f"{type(either).__name__} where there are no kernels for it"
    return either


def linear_blocks(x_TD: Tensor, x_scales_TG: Tensor, weight_ND: Tensor, weight_scales_QG: Tensor) -> Tensor:
    """[T, N] in float64: both sides widened, then one matmul."""
    x_scale_TD = x_scales_TG.double().repeat_interleave(BLOCK, dim=1)[:, : x_TD.shape[1]]
    rows_NG = weight_scales_QG.double().repeat_interleave(BLOCK, dim=0)[: weight_ND.shape[0]]
    weight_scale_ND = rows_NG.repeat_interleave(BLOCK, dim=1)[:, : weight_ND.shape[1]]
    return (x_TD.double() * x_scale_TD) @ (weight_ND.double() * weight_scale_ND).T
