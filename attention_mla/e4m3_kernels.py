"""Narrow numbers inside Triton kernels: casts to e4m3 and bfloat16, scales of groups of 128. Nothing to launch.

A scale takes the stored value back: scale = max(largest magnitude of the group, 1e-4) / 448.

Letters: G groups, K = 128 values of a group.
"""

import triton
import triton.language as tl
from triton import knobs

__all__ = ["INTERPRETED", "quantised", "to_bfloat16", "to_e4m3"]

INTERPRETED = bool(knobs.runtime.interpret)
MAX = tl.constexpr(448.0)
FLOOR = tl.constexpr(1e-4)


@triton.jit
def to_e4m3(x, BY_HAND: tl.constexpr):
    """float32 within +-448 to the nearest e4m3 number, ties to even. Example: 127.9 and 120.1 become 128 and 120.

    BY_HAND is for Triton's interpreter, whose own cast loses what rounding carries into the exponent (127.9 to 64).
    """
    if BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        normal = (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) & 0x7FF) - (120 << 3)
        small = (((tl.abs(x) + 16384.0) - 16384.0) * 512.0).to(tl.int32)  # below 2^-6 numbers stand 2^-9 apart
        code = tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def to_bfloat16(x, BY_HAND: tl.constexpr):
    """Finite float32 to the nearest bfloat16, ties to even. Example: 1.00390625 and 1.01171875 become 1 and 1.015625.

    BY_HAND is for Triton's interpreter, whose own cast cuts off.
    """
    if BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def quantised(x_GK, BY_HAND: tl.constexpr):
    """(e4m3 [G, K], scales [G]) of float32 [G, K]. Example, K = 2: (224, -448) and scale 1/448 of (0.5, -1)."""
    scale_G = tl.maximum(tl.max(tl.abs(x_GK), 1), FLOOR) / MAX
    values_GK = tl.minimum(tl.maximum(x_GK / scale_G[:, None], -MAX), MAX)
    return to_e4m3(values_GK, BY_HAND), scale_G
