"""What becomes of a token before it attends, as Triton kernels: its latent is appended, its queries are turned.

`append` is RMSNorm, rotary embedding and the write into the paged cache in one pass, for plain and fp8 rows;
`turn_queries` rotates the rope part of every head. The numbers are those of `norm.rms_norm`, `rope.rotate` and
`LatentRows.write`. Knows places in the cache; does not know requests or weights of other kinds than the norm's.

Letters: T tokens here, H heads, C latent rank, P rope dim, N rows by place, G groups of 128 latents.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .e4m3_kernels import INTERPRETED, quantised, to_bfloat16
from .latent_rows import LatentRows
from .norm import wide
from .rope import Rotation

__all__ = ["append", "append_constants", "turn_constants", "turn_queries"]

BLOCK_H = 16
WIDE_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _turned(x, rows_R1, turns, P: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr, WIDE: tl.constexpr):
    """[R, P]: the dims from `rows_R1` on times the P/2 complex numbers at `turns`, each dim with its partner beside it.

    Example, one pair and a right angle, (cos, sin) = (0, 1): (3, 5) becomes (-5, 3).
    """
    dims_P = tl.arange(0, BLOCK_P)[None, :]
    inside_P = dims_P < P
    if INTERLEAVED:
        pair_P = dims_P // 2
        is_real_P = dims_P % 2 == 0
        partner_P = dims_P ^ 1
    else:
        pair_P = dims_P % (P // 2)
        is_real_P = dims_P < P // 2
        partner_P = (dims_P + P // 2) % P
    own_RP = tl.load(x + rows_R1 + dims_P, mask=inside_P, other=0.0).to(WIDE)
    other_RP = tl.load(x + rows_R1 + partner_P, mask=inside_P, other=0.0).to(WIDE)
    cos_P = tl.load(turns + 2 * pair_P, mask=inside_P, other=0.0)
    sin_P = tl.load(turns + 2 * pair_P + 1, mask=inside_P, other=0.0)
    return own_RP * cos_P + tl.where(is_real_P, -other_RP, other_RP) * sin_P


@triton.jit
def _append_kernel(
    latent_TC,
    rope_TP,
    norm_C,
    turns_TP,
    places_T,
    latents_NC,
    scales_NG,
    rope_NP,
    latent_stride,
    rope_stride,
    row_stride: tl.constexpr,
    scale_stride: tl.constexpr,
    key_stride: tl.constexpr,
    EPS: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FP8: tl.constexpr,
    BY_HAND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a token; a token with place -1 is padding and is not written.

    Example, C = 2, P = 2, eps 0: latent (3, 4) has root mean square sqrt(12.5); with weight (1, 2) the cache gets
    (0.8485, 2.2627), and behind it the rope key (1, 0), turned by a right angle: (0, 1).
    """
    t = tl.program_id(0).to(tl.int64)
    place = tl.load(places_T + t)
    if place >= 0:
        dims_C = tl.arange(0, BLOCK_C)
        x_C = tl.load(latent_TC + t * latent_stride + dims_C, mask=dims_C < C, other=0.0)
        weight_C = tl.load(norm_C + dims_C, mask=dims_C < C, other=0.0)
        wide_C = x_C.to(WIDE)
        normed_C = (wide_C / tl.sqrt(tl.sum(wide_C * wide_C, 0) / C + EPS)).to(x_C.dtype)
        # Rounded before and after the weight, as the model's own code does it.
        y_C = (normed_C.to(WIDE) * weight_C.to(WIDE)).to(x_C.dtype)
        if FP8:
            y_GK, scale_G = quantised(tl.reshape(y_C.to(tl.float32), (BLOCK_C // 128, 128)), BY_HAND)
            groups_G = tl.arange(0, BLOCK_C // 128)
            tl.store(scales_NG + place * scale_stride + groups_G, scale_G, mask=groups_G < C // 128)
            y_C = tl.reshape(y_GK, (BLOCK_C,))
        tl.store(latents_NC + place * row_stride + dims_C, y_C, mask=dims_C < C)

        dims_P = tl.arange(0, BLOCK_P)[None, :]
        row_11 = tl.zeros((1, 1), tl.int64) + t * rope_stride
        turned_1P = _turned(rope_TP, row_11, turns_TP + t * P, P, INTERLEAVED, BLOCK_P, WIDE)
        turned_1P = turned_1P.to(x_C.dtype)
        if FP8:
            turned_1P = to_bfloat16(turned_1P.to(tl.float32), BY_HAND)
        tl.store(rope_NP + place * key_stride + dims_P, turned_1P.to(rope_NP.dtype.element_ty), mask=dims_P < P)


def append(
    latent_TC: Tensor,
    rope_TP: Tensor,
    *,
    norm_C: Tensor,
    eps: float,
    rotation: Rotation,
    interleaved: bool,
    places_T: Tensor,
    rows: LatentRows,
) -> None:
    """Norm the latents, turn the rope keys, write both to `places_T` of `rows`. Inputs may be parts of wider rows."""
    if not latent_TC.shape[0]:
        return
    assert latent_TC.stride(1) == rope_TP.stride(1) == 1, "rows have gaps"
    _append_kernel[(latent_TC.shape[0],)](
        latent_TC,
        rope_TP,
        norm_C,
        torch.view_as_real(rotation.turn_TP2),
        places_T,
        rows.latents_NC,
        rows.scales_NG,
        rows.rope_NP,
        latent_TC.stride(0),
        rope_TP.stride(0),
        **append_constants(rows, eps=eps, interleaved=interleaved, dtype=latent_TC.dtype),
    )


def append_constants(rows: LatentRows, *, eps: float, interleaved: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for, where the latents have `dtype`."""
    rank, rope_dim = rows.latents_NC.shape[1], rows.rope_NP.shape[1]
    return {
        "row_stride": rows.latents_NC.stride(0),
        "scale_stride": rows.scales_NG.stride(0) if rows.scales_NG is not None else 0,
        "key_stride": rows.rope_NP.stride(0),
        "EPS": eps,
        "C": rank,
        "P": rope_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_C": triton.next_power_of_2(rank),
        "BLOCK_P": triton.next_power_of_2(rope_dim),
        "FP8": rows.scales_NG is not None,
        "BY_HAND": INTERPRETED,
        "WIDE": WIDE_TYPES[wide(dtype)],
    }


@triton.jit
def _turn_kernel(
    rope_THP,
    turns_TP,
    out_THP,
    stride_t,
    stride_h,
    H: tl.constexpr,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a token and 16 heads. Example as for one pair: right angles turn (3, 5) into (-5, 3)."""
    t = tl.program_id(0).to(tl.int64)
    heads_H1 = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dims_P = tl.arange(0, BLOCK_P)[None, :]
    # A head that is not there turns as the last one does, and is not stored.
    rows_H1 = t * stride_t + tl.minimum(heads_H1, H - 1) * stride_h
    turned_HP = _turned(rope_THP, rows_H1, turns_TP + t * P, P, INTERLEAVED, BLOCK_P, WIDE)
    out_HP = out_THP + (t * H + heads_H1) * P + dims_P
    tl.store(out_HP, turned_HP.to(out_THP.dtype.element_ty), mask=(heads_H1 < H) & (dims_P < P))


def turn_queries(rope_THP: Tensor, *, rotation: Rotation, interleaved: bool, out_THP: Tensor) -> None:
    """The rope part of the queries, turned by their tokens' positions. Inputs may be parts of wider rows."""
    num_tokens, heads, rope_dim = rope_THP.shape
    if not num_tokens:
        return
    assert rope_THP.stride(2) == 1, "rows have gaps"
    assert out_THP.is_contiguous(), f"out has strides {out_THP.stride()}"
    _turn_kernel[(num_tokens, triton.cdiv(heads, BLOCK_H))](
        rope_THP,
        torch.view_as_real(rotation.turn_TP2),
        out_THP,
        rope_THP.stride(0),
        rope_THP.stride(1),
        **turn_constants(heads, rope_dim, interleaved=interleaved, dtype=rope_THP.dtype),
    )


def turn_constants(heads: int, rope_dim: int, *, interleaved: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "H": heads,
        "P": rope_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_H": BLOCK_H,
        "BLOCK_P": triton.next_power_of_2(rope_dim),
        "WIDE": WIDE_TYPES[wide(dtype)],
    }
