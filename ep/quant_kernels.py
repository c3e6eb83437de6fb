"""Rows in fp8 (e4m3) with a scale for each row and 128 columns, on a GPU; what `rows.Fp8Codec` does, bit for bit.

Legend: N rows, K top-k, D columns, d blocks of them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (Triton's own language is typed as plain Python.)

import triton
import triton.language as tl
from torch import Tensor

from .kernel_casts import FP8_LIMIT, narrow
from .rows import FP8_BLOCK, FP8_FLOOR

FLOOR = tl.constexpr(FP8_FLOOR)
BLOCKS_AT_ONCE = 8


@triton.jit
def block_scales(peak, POWER_OF_TWO: tl.constexpr):
    """float32 scales of blocks whose largest magnitude is `peak`: 448 -> 1, or the next power of two.

    The next power of two of a positive float: a carry out of the mantissa, 0.3 = 1.2 * 2^-2 -> 2^-1, 0.5 -> 0.5.
    """
    scale = tl.div_rn(tl.maximum(peak, FLOOR), FP8_LIMIT)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def to_fp8(x, scale, EXACT: tl.constexpr):
    """x / scale in fp8: 224 and scale 1 -> 224; -3 and 0.5 -> -6."""
    return narrow(tl.minimum(tl.maximum(tl.div_rn(x, scale), -FP8_LIMIT), FP8_LIMIT), tl.float8e4nv, EXACT)


@triton.jit
def quantize_kernel(
    x_ptr, places_ptr, q_ptr, scale_ptr, x_stride, q_stride, scale_stride,
    D: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program a row and BLOCKS blocks of it. With TOP_K 0 every row is quantised, else those with any place.

    BLOCK 2: x [[448, -224, 1, 2]] -> q [[448, -224, 224, 448]], scales [[1, 1 / 224]].
    """
    row = tl.program_id(0).to(tl.int64)
    if TOP_K > 0:
        choice = tl.arange(0, BLOCK_K)
        place = tl.load(places_ptr + row * TOP_K + choice, mask=choice < TOP_K, other=-1)
        if tl.max(place, axis=0) < 0:
            return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
    scale = block_scales(tl.max(tl.abs(x), axis=1), POWER_OF_TWO)
    tl.store(q_ptr + row * q_stride + column, to_fp8(x, scale[:, None], EXACT), mask=column < D)
    tl.store(scale_ptr + row * scale_stride + block, scale, mask=block * BLOCK < D)


def quantize_rows(
    x_ND: Tensor,
    q_ND: Tensor,
    scale_Nd: Tensor,
    *,
    places_NK: Tensor | None = None,
    power_of_two: bool = False,
    block: int = FP8_BLOCK,
) -> None:
    """Fill q_ND (fp8) and scale_Nd (float32). With `places_NK`, rows without a place are not touched."""
    num_rows, width = x_ND.shape
    assert q_ND.shape == x_ND.shape, (q_ND.shape, x_ND.shape)
    assert scale_Nd.shape == (num_rows, triton.cdiv(width, block)), (scale_Nd.shape, x_ND.shape)
    assert x_ND.stride(1) == q_ND.stride(1) == scale_Nd.stride(1) == 1, "columns must lie side by side"
    if num_rows == 0:
        return
    top_k = places_NK.shape[1] if places_NK is not None else 0
    grid = num_rows, triton.cdiv(width, block * BLOCKS_AT_ONCE)
    quantize_kernel[grid](
        x_ND, places_NK, q_ND, scale_Nd, x_ND.stride(0), q_ND.stride(0), scale_Nd.stride(0),
        D=width, TOP_K=top_k, BLOCK_K=triton.next_power_of_2(max(top_k, 1)), BLOCK=block, BLOCKS=BLOCKS_AT_ONCE,
        POWER_OF_TWO=power_of_two, EXACT=x_ND.device.type == "cpu",
    )  # fmt: skip
