"""Rows to fp8 where no norm comes before a matmul that wants them so (there: `norm_kernels`), as a Triton kernel.

Letters: T tokens here, D columns, G = ceil(D / 128) groups of them.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .e4m3_kernels import INTERPRETED, quantised

__all__ = ["quantise", "quantise_constants"]

GROUPS_AT_ONCE = 16


@triton.jit
def _quantise_kernel(
    x_TD,
    values_TD,
    scales_TG,
    x_stride,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One program a row and some groups of it.

    Example, groups of 2: (448, -224) becomes itself with scale 1, (1, 2) becomes (224, 448) with scale 1 / 224.
    """
    t = tl.program_id(0).to(tl.int64)
    groups_G = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    dims_GK = groups_G[:, None] * 128 + tl.arange(0, 128)[None, :]
    num_groups: tl.constexpr = (D + 127) // 128
    x_GK = tl.load(x_TD + t * x_stride + dims_GK, mask=dims_GK < D, other=0.0)
    values_GK, scale_G = quantised(x_GK.to(tl.float32), BY_HAND)
    tl.store(scales_TG + t * num_groups + groups_G, scale_G, mask=groups_G < num_groups)
    tl.store(values_TD + t * D + dims_GK, values_GK, mask=dims_GK < D)


def quantise(x_TD: Tensor, *, values_TD: Tensor, scales_TG: Tensor) -> None:
    """Fill e4m3 values and float32 scales; x may be parts of wider rows."""
    num_tokens, dim = x_TD.shape
    groups = triton.cdiv(dim, 128)
    assert scales_TG.shape == (num_tokens, groups), f"scales {tuple(scales_TG.shape)} for x {tuple(x_TD.shape)}"
    assert x_TD.stride(1) == 1, "rows have gaps"
    assert values_TD.is_contiguous(), f"values have strides {values_TD.stride()}"
    if num_tokens:
        grid = num_tokens, triton.cdiv(groups, GROUPS_AT_ONCE)
        _quantise_kernel[grid](x_TD, values_TD, scales_TG, x_TD.stride(0), **quantise_constants(dim))


def quantise_constants(dim: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {"D": dim, "GROUPS": GROUPS_AT_ONCE, "BY_HAND": INTERPRETED}
