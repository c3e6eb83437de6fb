"""What there is to do in absorbed attention, listed on the device once a step for every layer to walk.

A context is cut at multiples of `split_tokens` from the request's own position 0; an item is one split for one tile of
query rows. The query rows of a request are its tokens times the heads, heads filled up to a power of two:

    2 tokens, 3 heads, tiles of 4 rows      rows   t0h0 t0h1 t0h2 .. | t1h0 t1h1 t1h2 ..
    300 tokens of context, splits of 128    items  3 splits x 2 tiles = 6, tiles of a split side by side in the list

so that the tiles of a split run at the same time and share its latents in the cache of the device. A request without
tokens or context has no items. Knows lengths only.

Letters: B requests, H heads, I items.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .absorbed import Absorbed
from .norm import wide

__all__ = ["Scratch", "Work", "plan_constants", "plan_work", "tile_rows"]


def tile_rows(num_heads: int) -> int:
    """Query rows of a tile: 64 feed a warp group's matrix unit; few heads need little and take the small one."""
    return 16 if num_heads <= 16 else 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The items of one step, written by `plan_work`."""

    request_I: Tensor
    """int32: which request an item belongs to; what lies past the last item is never read."""
    first_item_B: Tensor
    """int32 [B + 1]: a request's items are first_item_B[b] .. first_item_B[b + 1]; the last entry is their number."""
    num_heads: int
    split_tokens: int

    @property
    def rows_per_token(self) -> int:
        return triton.next_power_of_2(self.num_heads)

    @property
    def tile_rows(self) -> int:
        return tile_rows(self.num_heads)

    @classmethod
    def room_for(cls, requests: Absorbed, *, num_heads: int, split_tokens: int) -> "Work":
        """As many items as these requests can have at most, by what the host knows of them."""
        device = requests.context_B.device
        num_splits = requests.total_context // split_tokens + requests.num_requests
        num_tiles = -(-requests.most_tokens * triton.next_power_of_2(num_heads) // tile_rows(num_heads))
        return cls(
            request_I=torch.empty(num_splits * num_tiles, dtype=torch.int32, device=device),
            first_item_B=torch.empty(requests.num_requests + 1, dtype=torch.int32, device=device),
            num_heads=num_heads,
            split_tokens=split_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """What the items of a layer leave for the merge; any number of layers may use one after the other."""

    mean_IMC: Tensor
    """Wide dtype: the mean latent of each query row of each item."""
    lse_IM: Tensor
    """Wide dtype: log2 of the sum of 2^score."""

    @classmethod
    def room_for(cls, work: Work, rank: int, dtype: torch.dtype) -> "Scratch":
        """`rank` is C; `dtype` that of the queries."""
        shape = (work.request_I.shape[0], work.tile_rows)
        device = work.request_I.device
        return cls(
            mean_IMC=torch.empty(*shape, rank, dtype=wide(dtype), device=device),
            lse_IM=torch.empty(shape, dtype=wide(dtype), device=device),
        )


@triton.jit(do_not_specialize=["num_requests"])
def _plan_kernel(
    context_B,
    num_tokens_B,
    request_I,
    first_item_B,
    num_requests,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program a request, and one more for the total.

    Example: contexts [300, 0, 128], tokens [1, 1, 2], 4 heads, splits of 128, tiles of 4 rows:
    items [3 * 1, 0, 1 * 2], first_item [0, 3, 3, 5], request [0, 0, 0, 2, 2].
    """
    b = tl.program_id(0)
    others_B = tl.arange(0, BLOCK_B)
    inside_B = others_B < num_requests
    context = tl.load(context_B + others_B, mask=inside_B, other=0)
    rows = tl.load(num_tokens_B + others_B, mask=inside_B, other=0) * SPAN
    items = (((context + SPLIT - 1) // SPLIT) * ((rows + TILE - 1) // TILE)).to(tl.int32)
    first = tl.sum(tl.where(others_B < b, items, 0))
    count = tl.sum(tl.where(others_B == b, items, 0))
    tl.store(first_item_B + b, first)
    for start in range(0, count, BLOCK_I):
        places = start + tl.arange(0, BLOCK_I)
        tl.store(request_I + first + places, b, mask=places < count)


def plan_work(requests: Absorbed, out: Work) -> None:
    """Fill `out` from the requests' lengths, on the device; it must have room for every item."""
    num_requests = requests.context_B.shape[0]
    assert out.first_item_B.shape == (num_requests + 1,), f"{tuple(out.first_item_B.shape)} for {num_requests} requests"
    _plan_kernel[(num_requests + 1,)](
        requests.context_B,
        requests.num_tokens_B,
        out.request_I,
        out.first_item_B,
        num_requests,
        **plan_constants(out, num_requests),
    )


def plan_constants(work: Work, num_requests: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "SPAN": work.rows_per_token,
        "SPLIT": work.split_tokens,
        "TILE": work.tile_rows,
        "BLOCK_B": triton.next_power_of_2(num_requests + 1),
        "BLOCK_I": 128,
    }
