"""`pairs.group_pairs` on a GPU: a stable counting sort in two kernels. Same result, bit for bit.

    count   each chunk of pairs counts its slots
    place   each chunk adds up the counts before it, and numbers its own pairs

Numbers of rows, which change from step to step, are not specialised: nothing is compiled while it runs.

Legend: N rows received, K top-k, M places of pairs, L local slots, C chunks of pairs.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (Triton's own language is typed as plain Python.)

import triton
import triton.language as tl
from torch import Tensor

from .pairs import CHUNK, PairGroups


@triton.jit
def _slots_of_chunk(slots_ptr, row_stride, num_pairs, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    """(int32 slots of this program's chunk, -1 past the end; the pairs' numbers)."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    place = (pair // TOP_K).to(tl.int64) * row_stride + pair % TOP_K
    return tl.load(slots_ptr + place, mask=pair < num_pairs, other=-1).to(tl.int32), pair


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def count_kernel(
    slots_ptr, chunk_counts_ptr, row_stride, num_pairs, num_slots,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One program a chunk. slots [[1, -1], [0, 1]], 2 slots, one chunk -> chunk_counts [[1, 2]]."""
    slot, _ = _slots_of_chunk(slots_ptr, row_stride, num_pairs, TOP_K, CHUNK)
    slots = tl.arange(0, BLOCK_L)
    counts = tl.sum((slot[:, None] == slots[None, :]).to(tl.int32), axis=0)
    tl.store(chunk_counts_ptr + tl.program_id(0) * num_slots + slots, counts, mask=slots < num_slots)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_chunks"])
def place_kernel(
    slots_ptr, chunk_counts_ptr, starts_ptr, rows_ptr, places_ptr, row_stride, num_pairs, num_slots, num_chunks,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program a chunk. slots [[1, -1], [0, 1]], chunk_counts [[1, 2]] -> starts [0, 1, 3], rows
    [1, 0, 1, .], places [[1, -1], [0, 2]]."""
    chunk = tl.program_id(0)
    slots = tl.arange(0, BLOCK_L)
    total = tl.full([BLOCK_L], 0, tl.int32)
    before = tl.full([BLOCK_L], 0, tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        inside = (chunks < num_chunks)[:, None] & (slots < num_slots)[None, :]
        counts = tl.load(chunk_counts_ptr + chunks[:, None] * num_slots + slots[None, :], mask=inside, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total)
    if chunk == 0:
        tl.store(starts_ptr, 0)
        tl.store(starts_ptr + 1 + slots, ends, mask=slots < num_slots)

    slot, pair = _slots_of_chunk(slots_ptr, row_stride, num_pairs, TOP_K, CHUNK)
    mine = (slot[:, None] == slots[None, :]).to(tl.int32)
    first_place = ends - total + before
    place = tl.sum(mine * (first_place[None, :] + tl.cumsum(mine, axis=0) - mine), axis=1)
    tl.store(rows_ptr + place, pair // TOP_K, mask=slot >= 0)
    tl.store(places_ptr + pair, tl.where(slot >= 0, place, -1), mask=pair < num_pairs)


def group_pairs(slots_NK: Tensor, groups: PairGroups) -> None:
    """Fill `groups`. slots_NK: int64 local slots, -1 none; rows may lie apart."""
    num_rows, top_k = slots_NK.shape
    assert slots_NK.stride(1) == 1 or top_k == 1, slots_NK.stride()
    assert groups.places_NK.shape == slots_NK.shape, (groups.places_NK.shape, slots_NK.shape)
    num_chunks = groups.chunk_counts_CL.shape[0]
    if num_chunks == 0:
        groups.starts_L.zero_()
        return
    block_l = triton.next_power_of_2(groups.num_slots)
    sizes = {"TOP_K": top_k, "CHUNK": CHUNK, "BLOCK_L": block_l}
    numbers = slots_NK.stride(0), num_rows * top_k, groups.num_slots
    count_kernel[(num_chunks,)](slots_NK, groups.chunk_counts_CL, *numbers, **sizes)
    place_kernel[(num_chunks,)](
        slots_NK, groups.chunk_counts_CL, groups.starts_L, groups.rows_M, groups.places_NK, *numbers, num_chunks,
        **sizes, BLOCK_C=64,
    )  # fmt: skip
