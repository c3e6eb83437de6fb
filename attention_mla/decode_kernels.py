"""Absorbed attention of decode rows over pages, as a Triton kernel: each split of each context by itself.

Every layer runs `attend`, then `merge_splits`, over the items that `work_kernels` listed: an item is one split of a
request's context for one tile of its query rows. A row's numbers follow from its own context alone: not from batch
mates, nor from the number of programs.

A tile has at most 64 rows, for the sums of 128 x 512 do not fit into the registers of a multiprocessor. Its width
depends on the number of heads only: a wider tile may round differently.
Knows pages by number and latents by place; does not know requests, weights or layers.

Letters: T tokens here, B requests, H heads, C latent rank, P rope dim, I items, M query rows of one tile, N latents by
place (in the kernel: context positions looked at together), G pages end to end; of a row: groups of 128 latents.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .absorbed import Absorbed
from .e4m3_kernels import INTERPRETED
from .latent_rows import LatentRows
from .norm import wide
from .work_kernels import Scratch, Work

__all__ = ["ATTEND_OPTIONS", "attend", "attend_constants", "page_block"]

UNSEEN = tl.constexpr(-1e30)
"""A score that must not count. A row that sees nothing of a split gets shares of all of it, which nobody merges."""
LOG2_E = 1.4426950408889634
WIDE_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
ATTEND_OPTIONS = {"num_warps": 8, "num_stages": 2}
"""Two stages of 64 latents and a tile's queries fill the shared memory of a multiprocessor."""


def page_block(page_size: int) -> int:
    """Positions that are looked at together: a block lies on one page. Raises ValueError where none does."""
    for block in (64, 32, 16):
        if page_size % block == 0:
            return block
    raise ValueError(f"block_size is {page_size}; Triton kernels need a multiple of 16, e.g. 64")


@triton.jit(do_not_specialize=["num_requests"])
def _attend_kernel(
    absorbed_THC,
    rope_THP,
    latents_NC,
    scales_NG,
    rope_NP,
    pages_G,
    first_page_B,
    first_token_B,
    num_tokens_B,
    context_B,
    request_I,
    first_item_B,
    mean_IMC,
    lse_IM,
    out_THC,
    num_requests,
    score_scale,
    absorbed_stride_t,
    absorbed_stride_h,
    rope_stride_t,
    rope_stride_h,
    latent_stride: tl.constexpr,
    scale_stride: tl.constexpr,
    key_stride: tl.constexpr,
    H: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Programs walk the items in turns: softmax over one split for one tile, the sum kept in registers.

    A request's only split goes to `out` at once; otherwise the mean and the log2 of the sum of 2^score go to scratch.

    Example: one head, C = 1, P = 1, query (1, 0), latents (0, 9) and (1, 9), scale ln 2: the scores are log2 1 and
    log2 2, the shares 1/3 and 2/3, so the mean latent is 2/3 and the log2 of the sum is log2 3.
    """
    num_items = tl.load(first_item_B + num_requests)
    # What is the same in every turn is computed anew in each: kept in registers, it would push out the accumulator.
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True):
        b = tl.load(request_I + item)
        context = tl.load(context_B + b).to(tl.int32)
        num_tokens = tl.load(num_tokens_B + b).to(tl.int32)
        first_page = tl.load(first_page_B + b)
        first_token = tl.load(first_token_B + b)
        local = item - tl.load(first_item_B + b)
        num_tiles = (num_tokens * SPAN + TILE - 1) // TILE
        tile = local % num_tiles
        begin = (local // num_tiles) * SPLIT
        end = tl.minimum(begin + SPLIT, context)

        rows_M = tile * TILE + tl.arange(0, TILE)
        token_M = rows_M // SPAN
        real_M1 = ((token_M < num_tokens) & (rows_M % SPAN < H))[:, None]
        # A token sees itself and what came before it in the same request.
        limit_M1 = (context - num_tokens + token_M + 1)[:, None]
        offsets_C = tl.arange(0, BLOCK_C)
        offsets_P = tl.arange(0, BLOCK_P)
        # A row that is no query's does as the last one does, and is not stored.
        where_M1 = (first_token + tl.minimum(token_M, num_tokens - 1))[:, None]
        head_M1 = tl.minimum(rows_M % SPAN, H - 1)[:, None]
        q_MC = tl.load(
            absorbed_THC + where_M1 * absorbed_stride_t + head_M1 * absorbed_stride_h + offsets_C[None, :],
            mask=(offsets_C < C)[None, :],
            other=0.0,
        )
        q_MP = tl.load(
            rope_THP + where_M1 * rope_stride_t + head_M1 * rope_stride_h + offsets_P[None, :],
            mask=(offsets_P < P)[None, :],
            other=0.0,
        )
        if UPCAST:
            q_MC = q_MC.to(WIDE)
            q_MP = q_MP.to(WIDE)

        offsets_N1 = tl.arange(0, BLOCK_N)[:, None]
        offsets_NC = offsets_N1 * latent_stride + offsets_C[None, :]
        offsets_NP = offsets_N1 * key_stride + offsets_P[None, :]
        offsets_NG = offsets_N1 * scale_stride + tl.arange(0, BLOCK_C // 128 if FP8 else 1)[None, :]
        largest_M = tl.full((TILE,), UNSEEN, WIDE)
        sum_M = tl.zeros((TILE,), WIDE)
        acc_MC = tl.zeros((TILE, BLOCK_C), WIDE)
        for start in tl.range(begin, end, BLOCK_N, disable_licm=True):
            positions_N = start + tl.arange(0, BLOCK_N)
            # What a page holds past the context is not zero, it may be NaN.
            there_N1 = (positions_N < context)[:, None]
            place = tl.load(pages_G + first_page + start // PAGE) * PAGE + start % PAGE
            k_NC = tl.load(
                latents_NC + place * latent_stride + offsets_NC, mask=there_N1 & (offsets_C < C)[None, :], other=0.0
            )
            k_NP = tl.load(
                rope_NP + place * key_stride + offsets_NP, mask=there_N1 & (offsets_P < P)[None, :], other=0.0
            )
            if FP8:
                scale_NG = tl.load(scales_NG + place * scale_stride + offsets_NG, mask=there_N1, other=0.0)
                k_NG128 = tl.reshape(k_NC.to(tl.float32), (BLOCK_N, BLOCK_C // 128, 128)) * scale_NG[:, :, None]
                k_NC = tl.reshape(k_NG128.to(q_MC.dtype), (BLOCK_N, BLOCK_C))
            if UPCAST:
                k_NC = k_NC.to(WIDE)
                k_NP = k_NP.to(WIDE)
            scores_MN = tl.dot(q_MP, tl.trans(k_NP), out_dtype=WIDE, input_precision="ieee")
            scores_MN = tl.dot(q_MC, tl.trans(k_NC), scores_MN, out_dtype=WIDE, input_precision="ieee")
            scores_MN = tl.where(positions_N[None, :] < limit_M1, scores_MN * score_scale, UNSEEN)
            new_largest_M = tl.maximum(largest_M, tl.max(scores_MN, 1))
            fade_M = tl.exp2(largest_M - new_largest_M)
            shares_MN = tl.exp2(scores_MN - new_largest_M[:, None])
            sum_M = sum_M * fade_M + tl.sum(shares_MN, 1)
            acc_MC = tl.dot(
                shares_MN.to(absorbed_THC.dtype.element_ty).to(k_NC.dtype),
                k_NC,
                acc_MC * fade_M[:, None],
                out_dtype=WIDE,
                input_precision="ieee",
            )
            largest_M = new_largest_M

        mean_MC = acc_MC / sum_M[:, None]
        if context <= SPLIT:
            tl.store(
                out_THC + (where_M1 * H + head_M1) * C + offsets_C[None, :],
                mean_MC.to(out_THC.dtype.element_ty),
                mask=real_M1 & (offsets_C < C)[None, :],
            )
        else:
            slots_M = (tl.zeros((TILE,), tl.int64) + item) * TILE + tl.arange(0, TILE)
            tl.store(mean_IMC + slots_M[:, None] * C + offsets_C[None, :], mean_MC, mask=(offsets_C < C)[None, :])
            tl.store(lse_IM + slots_M, largest_M + tl.log2(sum_M))


def attend(
    absorbed_THC: Tensor,
    rope_THP: Tensor,
    rows: LatentRows,
    *,
    requests: Absorbed,
    work: Work,
    page_size: int,
    score_scale: float,
    num_programs: int,
    scratch: Scratch,
    out_THC: Tensor,
) -> None:
    """Attention over every item of `work`.

    score_scale   what a score is multiplied by before the softmax
    out_THC       gets the rows of requests that have one split only; `merge_splits` writes all others
    """
    heads, rank = absorbed_THC.shape[1:]
    assert work.num_heads == heads, f"work for {work.num_heads} heads, {heads} heads"
    assert work.split_tokens % page_block(page_size) == 0, f"splits of {work.split_tokens} on pages of {page_size}"
    expected = (work.request_I.shape[0], work.tile_rows, rank)
    assert scratch.mean_IMC.shape == expected, f"scratch {tuple(scratch.mean_IMC.shape)}, not {expected}"
    assert out_THC.is_contiguous(), f"out has strides {out_THC.stride()}"
    assert absorbed_THC.stride(2) == rope_THP.stride(2) == 1, "query rows have gaps"
    _attend_kernel[(num_programs,)](
        absorbed_THC,
        rope_THP,
        rows.latents_NC,
        rows.scales_NG,
        rows.rope_NP,
        requests.pages_G,
        requests.first_page_B,
        requests.first_token_B,
        requests.num_tokens_B,
        requests.context_B,
        work.request_I,
        work.first_item_B,
        scratch.mean_IMC,
        scratch.lse_IM,
        out_THC,
        requests.num_requests,
        score_scale * LOG2_E,
        absorbed_THC.stride(0),
        absorbed_THC.stride(1),
        rope_THP.stride(0),
        rope_THP.stride(1),
        **attend_constants(rows, work, page_size=page_size, dtype=absorbed_THC.dtype),
        **ATTEND_OPTIONS,
    )


def attend_constants(rows: LatentRows, work: Work, *, page_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for, where the queries have `dtype`."""
    rank, rope_dim = rows.latents_NC.shape[1], rows.rope_NP.shape[1]
    # Widening fp8 takes registers, and so do heads that are no power of two: wider blocks would not leave them.
    takes_more = rows.scales_NG is not None or work.rows_per_token != work.num_heads
    return {
        "latent_stride": rows.latents_NC.stride(0),
        "scale_stride": rows.scales_NG.stride(0) if rows.scales_NG is not None else 0,
        "key_stride": rows.rope_NP.stride(0),
        "H": work.num_heads,
        "SPAN": work.rows_per_token,
        "C": rank,
        "P": rope_dim,
        "PAGE": page_size,
        "SPLIT": work.split_tokens,
        "TILE": work.tile_rows,
        "BLOCK_N": min(page_block(page_size), 32 if takes_more else 64),
        "BLOCK_C": max(triton.next_power_of_2(rank), 16),
        "BLOCK_P": max(triton.next_power_of_2(rope_dim), 16),
        "FP8": rows.scales_NG is not None,
        "UPCAST": INTERPRETED,
        "WIDE": WIDE_TYPES[wide(dtype)],
    }
