"""Residual sum, RMSNorm and, where a matmul in fp8 follows, quantisation: one Triton kernel over the rows.

The numbers are those of `x + update` and `norm.rms_norm`, each rounded where they round. Knows nothing of where a norm
sits in the model.

Letters: T tokens here, D the normalised dim, G groups of 128 of it.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3_kernels import INTERPRETED, quantised
from .norm import wide

__all__ = ["add_norm", "add_norm_fp8", "norm_constants", "norm_options"]

WIDE_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _add_norm_kernel(
    x_TD,
    update_TD,
    weight_D,
    sum_TD,
    h_TD,
    scales_TG,
    x_stride,
    update_stride,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
    BY_HAND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a row.

    Example, D = 2, eps 0, weight (1, 2): x (1, 2) plus update (2, 2) is (3, 4), whose root mean square is sqrt(12.5);
    the normed row is (0.8485, 2.2627).
    """
    t = tl.program_id(0).to(tl.int64)
    dims_D = tl.arange(0, BLOCK_D)
    inside_D = dims_D < D
    x_D = tl.load(x_TD + t * x_stride + dims_D, mask=inside_D, other=0.0)
    dtype = x_D.dtype
    if ADD:
        update_D = tl.load(update_TD + t * update_stride + dims_D, mask=inside_D, other=0.0)
        x_D = (x_D.to(WIDE) + update_D.to(WIDE)).to(dtype)
        tl.store(sum_TD + t * D + dims_D, x_D, mask=inside_D)
    weight_D = tl.load(weight_D + dims_D, mask=inside_D, other=0.0)
    wide_D = x_D.to(WIDE)
    normed_D = (wide_D / tl.sqrt(tl.sum(wide_D * wide_D, 0) / D + EPS)).to(dtype)
    h_D = (normed_D.to(WIDE) * weight_D.to(WIDE)).to(dtype)
    if FP8:
        h_GK, scale_G = quantised(tl.reshape(h_D.to(tl.float32), (BLOCK_D // 128, 128)), BY_HAND)
        groups_G = tl.arange(0, BLOCK_D // 128)
        num_groups: tl.constexpr = (D + 127) // 128
        tl.store(scales_TG + t * num_groups + groups_G, scale_G, mask=groups_G < num_groups)
        h_D = tl.reshape(h_GK, (BLOCK_D,))
    tl.store(h_TD + t * D + dims_D, h_D, mask=inside_D)


def add_norm(
    x_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor, eps: float, *, sum_TD: Tensor | None, h_TD: Tensor
) -> None:
    """h = rms_norm(x + update); the sum goes to `sum_TD`, which may be `x_TD`. Without an update there is no sum."""
    _launch(x_TD, update_TD, weight_D, eps, sum_TD, h_TD, None)


def add_norm_fp8(
    x_TD: Tensor,
    update_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    sum_TD: Tensor | None,
    h_TD: Tensor,
    scales_TG: Tensor,
) -> None:
    """`add_norm` with h in fp8, and float32 scales [T, ceil(D / 128)]; the last group may be partial."""
    assert scales_TG.shape == (x_TD.shape[0], -(-x_TD.shape[1] // 128)), f"scales {tuple(scales_TG.shape)}"
    _launch(x_TD, update_TD, weight_D, eps, sum_TD, h_TD, scales_TG)


def _launch(
    x_TD: Tensor,
    update_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    sum_TD: Tensor | None,
    h_TD: Tensor,
    scales_TG: Tensor | None,
) -> None:
    num_tokens, dim = x_TD.shape
    if not num_tokens:
        return
    assert (update_TD is None) == (sum_TD is None), "an update and its sum come together"
    assert x_TD.stride(1) == 1, "rows have gaps"
    assert h_TD.is_contiguous(), f"h has strides {h_TD.stride()}"
    _add_norm_kernel[(num_tokens,)](
        x_TD,
        update_TD,
        weight_D,
        sum_TD,
        h_TD,
        scales_TG,
        x_TD.stride(0),
        update_TD.stride(0) if update_TD is not None else 0,
        **norm_constants(dim, eps=eps, add=update_TD is not None, fp8=scales_TG is not None, dtype=x_TD.dtype),
        **norm_options(dim),
    )


def norm_constants(dim: int, *, eps: float, add: bool, fp8: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "EPS": eps,
        "D": dim,
        "BLOCK_D": max(triton.next_power_of_2(dim), 128),
        "ADD": add,
        "FP8": fp8,
        "BY_HAND": INTERPRETED,
        "WIDE": WIDE_TYPES[wide(dtype)],
    }


def norm_options(dim: int) -> dict[str, int]:
    """How many warps share a row."""
    return {"num_warps": 8 if dim > 2048 else 4}
