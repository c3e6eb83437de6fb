"""Matmul in fp8 for projections: activations with a scale a row and 128 columns, weights with one a 128 x 128 block.

Products of a block are summed in the matrix unit, blocks in float32 by ascending column: always the same order, never
cut among programs, so a row does not depend on how many there are. `matrix.linear_blocks` is the same in torch.

Letters: T tokens here, D inputs, N outputs, G = ceil(D / 128) and Q = ceil(N / 128) blocks.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .e4m3_kernels import INTERPRETED

__all__ = ["LINEAR_OPTIONS", "fp8_linear", "linear_constants"]

TILE_T, TILE_N, BLOCK = 64, 128, 128
LINEAR_OPTIONS = {"num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_linear_kernel(
    x_TD,
    x_scales_TG,
    weight_ND,
    weight_scales_QG,
    out_TN,
    num_tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program a tile of the output; those of the same outputs run side by side and share the weights' blocks.

    Example, D = 2 as one block: x (3, 4) with scale 0.5 times weight (1, 2) with scale 10 is 11 * 5 = 55.
    """
    tokens_T = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    outputs_N = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    dims_D = tl.arange(0, BLOCK)
    num_blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    real_T1 = (tokens_T < num_tokens)[:, None]
    x_T1 = tokens_T.to(tl.int64)[:, None] * D
    weight_N1 = outputs_N.to(tl.int64)[:, None] * D
    acc_TN = tl.zeros((TILE_T, TILE_N), tl.float32)
    for block in range(num_blocks):
        inside_D = (block * BLOCK + dims_D < D)[None, :]
        x = tl.load(x_TD + x_T1 + block * BLOCK + dims_D[None, :], mask=real_T1 & inside_D, other=0.0)
        weight = tl.load(
            weight_ND + weight_N1 + block * BLOCK + dims_D[None, :], mask=(outputs_N < N)[:, None] & inside_D, other=0.0
        )
        x_scale_T = tl.load(x_scales_TG + tokens_T * num_blocks + block, mask=tokens_T < num_tokens, other=0.0)
        # A tile of outputs is one block of the weight.
        scale_T = x_scale_T * tl.load(weight_scales_QG + tl.program_id(1) * num_blocks + block)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        acc_TN += tl.dot(x, tl.trans(weight)) * scale_T[:, None]
    out = out_TN + tokens_T.to(tl.int64)[:, None] * N + outputs_N[None, :]
    tl.store(out, acc_TN.to(out_TN.dtype.element_ty), mask=real_T1 & (outputs_N < N)[None, :])


def fp8_linear(
    x_TD: Tensor, x_scales_TG: Tensor, weight_ND: Tensor, weight_scales_QG: Tensor, *, out_TN: Tensor
) -> None:
    """out = (x * scales) @ (weight * scales)^T in out's dtype; x and weight are e4m3, scales float32."""
    (num_tokens, dim), num_outputs = x_TD.shape, weight_ND.shape[0]
    blocks = -(-dim // BLOCK)
    assert x_scales_TG.shape == (num_tokens, blocks), f"scales {tuple(x_scales_TG.shape)} for x {tuple(x_TD.shape)}"
    expected = (-(-num_outputs // BLOCK), blocks)
    assert weight_scales_QG.shape == expected, f"scales {tuple(weight_scales_QG.shape)}, not {expected}"
    assert all(each.is_contiguous() for each in (x_TD, x_scales_TG, weight_ND, weight_scales_QG, out_TN)), "gaps"
    if num_tokens:
        _fp8_linear_kernel[(triton.cdiv(num_tokens, TILE_T), triton.cdiv(num_outputs, TILE_N))](
            x_TD,
            x_scales_TG,
            weight_ND,
            weight_scales_QG,
            out_TN,
            num_tokens,
            **linear_constants(num_outputs, dim),
            **LINEAR_OPTIONS,
        )


def linear_constants(num_outputs: int, dim: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {"N": num_outputs, "D": dim, "TILE_T": TILE_T, "TILE_N": TILE_N, "BLOCK": BLOCK, "UPCAST": INTERPRETED}
