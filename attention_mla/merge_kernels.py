"""The splits of a decode row's context put together, as a Triton kernel: the second half of absorbed attention.

In ascending order, always, by the logs of their sums. Knows the items of `work_kernels` and what `decode_kernels`
left of them.

Letters: T tokens here, B requests, H heads, C latent rank, I items, M query rows of one tile.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .absorbed import Absorbed
from .work_kernels import Scratch, Work

__all__ = ["MERGE_OPTIONS", "merge_constants", "merge_splits"]

MERGE_OPTIONS = {"num_warps": 4}


@triton.jit
def _merge_kernel(
    mean_IMC,
    lse_IM,
    first_token_B,
    num_tokens_B,
    context_B,
    first_item_B,
    out_THC,
    H: tl.constexpr,
    SPAN: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program a (request, head), token after token: the splits' means weighted by their sums, in ascending order.

    Example: means 1 and 4, logs2 of the sums 0 and 1: the shares are 1/3 and 2/3, the merged mean is 3.
    """
    b = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(context_B + b).to(tl.int32)
    num_tokens = tl.load(num_tokens_B + b).to(tl.int32)
    if context > SPLIT:
        first_item = tl.load(first_item_B + b)
        first_token = tl.load(first_token_B + b)
        num_tiles = (num_tokens * SPAN + TILE - 1) // TILE
        offsets_C = tl.arange(0, BLOCK_C)
        for token in range(num_tokens):
            row = token * SPAN + head
            # A token stops at itself: splits behind it hold nothing for it.
            num_splits = (context - num_tokens + token + SPLIT) // SPLIT
            slot = (first_item + row // TILE).to(tl.int64) * TILE + row % TILE
            mean_C = tl.load(mean_IMC + slot * C + offsets_C, mask=offsets_C < C, other=0.0)
            lse = tl.load(lse_IM + slot)
            for _ in range(1, num_splits):
                slot += num_tiles * TILE
                later_C = tl.load(mean_IMC + slot * C + offsets_C, mask=offsets_C < C, other=0.0)
                later = tl.load(lse_IM + slot)
                largest = tl.maximum(lse, later)
                both = largest + tl.log2(tl.exp2(lse - largest) + tl.exp2(later - largest))
                mean_C = mean_C * tl.exp2(lse - both) + later_C * tl.exp2(later - both)
                lse = both
            place = ((first_token + token) * H + head) * C + offsets_C
            tl.store(out_THC + place, mean_C.to(out_THC.dtype.element_ty), mask=offsets_C < C)


def merge_splits(scratch: Scratch, *, requests: Absorbed, work: Work, out_THC: Tensor) -> None:
    """Write the rows of requests with more than one split into `out_THC`; the others are there already."""
    heads, rank = out_THC.shape[1:]
    if not requests.num_requests:
        return
    _merge_kernel[(requests.num_requests, heads)](
        scratch.mean_IMC,
        scratch.lse_IM,
        requests.first_token_B,
        requests.num_tokens_B,
        requests.context_B,
        work.first_item_B,
        out_THC,
        **merge_constants(work, rank),
        **MERGE_OPTIONS,
    )


def merge_constants(work: Work, rank: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "H": work.num_heads,
        "SPAN": work.rows_per_token,
        "C": rank,
        "SPLIT": work.split_tokens,
        "TILE": work.tile_rows,
        "BLOCK_C": triton.next_power_of_2(rank),
    }
