"""How kernels narrow numbers: to the nearest, ties to even, on a GPU and in Triton's interpreter alike.

The interpreter rounds float32 to bfloat16 towards zero, and to fp8 in a way that is wrong at every second tie and where
a carry reaches the exponent. There bfloat16 is rounded in float32 first, for what the narrow format holds exactly is
converted exactly, and fp8 is put together by hand. Knows no kernel.

`EXACT` is a constexpr that launchers set where the interpreter runs, which is where tensors are on a CPU.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (Triton's own language is typed as plain Python.)

import triton
import triton.language as tl

FP8_LIMIT = tl.constexpr(448.0)
"""The largest e4m3 number."""


@triton.jit
def narrow(x, DTYPE: tl.constexpr, EXACT: tl.constexpr):
    """float32 `x` as DTYPE; for fp8 (e4m3) |x| must be at most 448.

    bfloat16 has steps of 2^-7 above 1: 1.00390625 (1 + 2^-8) lies half way between two and becomes 1, whose last bit is
    0; 1.01171875 (1 + 3 * 2^-8) becomes 1.015625.
    """
    if EXACT:
        if DTYPE == tl.bfloat16:  # noqa: SIM300
            x = _keep_bits(x, 16)
        elif DTYPE == tl.float8e4nv:  # noqa: SIM300
            return _e4m3_code(x).to(tl.float8e4nv, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _e4m3_code(x):
    """uint8 code of float32 `x`: sign, 4 bits of exponent (7 stands for 1), 3 of mantissa; 1.125 -> 0 0111 001.

    Below 2^-6 the code counts steps of 2^-9: next to 2^14 float32 has no finer ones.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) & 0x7FF) - (120 << 3)
    small = (((tl.abs(x) + 16384.0) - 16384.0) * 512.0).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def _keep_bits(x, DROPPED: tl.constexpr):
    """float32 `x` rounded to the nearest number whose last DROPPED bits are 0, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    half = (1 << (DROPPED - 1)) - 1
    rounded = (bits + half + ((bits >> DROPPED) & 1)) & (-1 << DROPPED)
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
