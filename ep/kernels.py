"""The exchange's own work on a GPU: who gets which row, rows into send buffers, and sums of rows that come back.

    find_places   a block of places for each member: `places.row_places`, bit for bit
    pack          rows into places: `ops.ReferenceOps.pack`, bit for bit
    add_rows      sums of rows, weighed or not: `sums.add`

Counts stay on the device and places without a row cost nothing. Rows need no unpacking: whoever computes with them
reads them where they landed. fp8 rows are made by `quant_kernels`, once a token, and packed as they are. Knows no
transport.

Numbers of rows, which change from step to step, are not specialised: nothing is compiled while it runs.

Legend: T rows to send, K top-k, R members, P places of all blocks, N rows of a result, J rows added for one, D model.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (Triton's own language is typed as plain Python.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_casts import narrow
from .places import RowPlaces
from .rows import RowFormat, Rows
from .sums import Sums

INTERPRETED_ROWS = 16
"""Rows that one program takes in the interpreter, which needs milliseconds for each; on a GPU it is one."""


@triton.jit(do_not_specialize=["num_rows", "slots_per_member", "num_members", "capacity"])
def places_kernel(
    slots_ptr, rows_ptr, fits_ptr, counts_ptr, overflow_ptr, back_ptr, num_rows, slots_stride, slots_per_member,
    num_members, capacity,
    K: tl.constexpr, J: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One program a member, through all rows. Place p of member m's block is m * (1 + capacity) + 1 + p.

    slots [[0, 3], [2, 3], [-1, 1]], 2 slots a member, capacity 2: member 0 gets rows 0 and 2, member 1 rows 0 and 1, so
    rows [3, 0, 2, 3, 0, 1], counts [2, 2], back [[1, 4], [5, -1], [2, -1]].
    """
    member = tl.program_id(0)
    begin = member * (1 + capacity)
    choice = tl.arange(0, BLOCK_K)
    taken = 0
    for start in range(0, num_rows, BLOCK_T):
        row = start + tl.arange(0, BLOCK_T)
        inside = (row < num_rows)[:, None] & (choice < K)[None, :]
        slot = tl.load(slots_ptr + row.to(tl.int64)[:, None] * slots_stride + choice[None, :], mask=inside, other=-1)
        dest_TK = tl.where(slot >= 0, slot // slots_per_member, -1).to(tl.int32)
        goes = tl.max((dest_TK == member).to(tl.int32), axis=1)
        place = taken + tl.cumsum(goes) - goes
        taken += tl.sum(goes)
        fits = (goes > 0) & (place < capacity)
        tl.store(rows_ptr + begin + 1 + place, row.to(tl.int64), mask=fits)
        tl.store(fits_ptr + row.to(tl.int64) * num_members + member, fits, mask=row < num_rows)
        if J > 0:
            # A member is the j-th of a row if j members before it get the row, too; each is counted at its first slot.
            earlier = (dest_TK[:, :, None] == dest_TK[:, None, :]) & (choice[:, None] > choice[None, :])[None, :, :]
            is_first = (dest_TK >= 0) & (tl.max(earlier.to(tl.int32), axis=2) == 0)
            before = tl.sum((is_first & (dest_TK < member)).to(tl.int32), axis=1)
            target = back_ptr + row.to(tl.int64) * J
            tl.store(target + before, tl.where(fits, begin + 1 + place, -1).to(tl.int64), mask=goes > 0)
            if member == 0:
                others = tl.arange(0, BLOCK_J)[None, :]
                unused = (others >= tl.sum(is_first.to(tl.int32), axis=1)[:, None]) & (others < J)
                tl.store(
                    target[:, None] + others,
                    tl.full([BLOCK_T, BLOCK_J], -1, tl.int64),
                    mask=unused & (row < num_rows)[:, None],
                )
    tl.store(counts_ptr + member, tl.minimum(taken, capacity).to(tl.int64))
    tl.store(overflow_ptr, 1, mask=taken > capacity)
    tl.store(rows_ptr + begin, num_rows.to(tl.int64))
    for start in range(0, capacity, BLOCK_T):
        place = start + tl.arange(0, BLOCK_T)
        nobody = (place >= taken) & (place < capacity)
        tl.store(rows_ptr + begin + 1 + place, tl.full([BLOCK_T], 0, tl.int64) + num_rows, mask=nobody)


@triton.jit(do_not_specialize=["num_places", "num_rows"])
def pack_kernel(
    order_ptr, origin_ptr, slots_ptr, weights_ptr, values_ptr,
    to_origin_ptr, to_slots_ptr, to_weights_ptr, to_values_ptr, num_places, num_rows,
    origin_stride, slots_stride, weights_stride, values_stride,
    to_origin_stride, to_slots_stride, to_weights_stride, to_values_stride,
    K: tl.constexpr, X: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N places and BLOCK_X words of values. A place whose row is num_rows gets slots of -1 only.

    order [1, 2], 2 rows with slots [[5], [7]] and values [[50], [70]] -> slots [[7], [-1]], values [[70], [anything]].
    """
    place = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.load(order_ptr + place, mask=place < num_places, other=num_rows)
    is_row = row < num_rows
    word = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    inside = is_row[:, None] & (word < X)[None, :]
    values = tl.load(values_ptr + row[:, None] * values_stride + word[None, :], mask=inside)
    tl.store(to_values_ptr + place[:, None] * to_values_stride + word[None, :], values, mask=inside)
    if tl.program_id(1) == 0:
        choice = tl.arange(0, BLOCK_K)[None, :]
        is_choice = is_row[:, None] & (choice < K)
        origin = tl.load(origin_ptr + row * origin_stride, mask=is_row)
        tl.store(to_origin_ptr + place * to_origin_stride, origin, mask=is_row)
        slots = tl.load(slots_ptr + row[:, None] * slots_stride + choice, mask=is_choice, other=-1)
        is_place = (place < num_places)[:, None] & (choice < K)
        tl.store(to_slots_ptr + place[:, None] * to_slots_stride + choice, slots, mask=is_place)
        weights = tl.load(weights_ptr + row[:, None] * weights_stride + choice, mask=is_choice)
        tl.store(to_weights_ptr + place[:, None] * to_weights_stride + choice, weights, mask=is_choice)


@triton.jit(do_not_specialize=["num_out"])
def add_kernel(
    rows_ptr, index_ptr, weights_ptr, out_ptr, num_out, rows_stride, index_stride, weights_stride, out_stride,
    D: tl.constexpr, J: tl.constexpr, WEIGHED: tl.constexpr, ZEROS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N sums and BLOCK_D columns. A result without rows becomes zeros, or with ZEROS false stays.

    rows [[1], [2], [4]], index [[2, 0], [-1, 1], [-1, -1]], weights [[10, 1], [5, .5], [0, 0]] -> [[41], [1], [0]].
    """
    out = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.full([BLOCK_N, BLOCK_D], 0.0, WIDE)
    any_row = out < 0
    for j in tl.static_range(J):
        index = tl.load(index_ptr + out * index_stride + j, mask=out < num_out, other=-1).to(tl.int64)
        is_row = index >= 0
        any_row = any_row | is_row
        inside = is_row[:, None] & (column < D)[None, :]
        row = tl.load(rows_ptr + index[:, None] * rows_stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        if WEIGHED:
            row = row * tl.load(weights_ptr + out * weights_stride + j, mask=is_row, other=0.0)[:, None]
        total += row
    wanted = (out < num_out) if ZEROS else any_row
    target = out_ptr + out[:, None] * out_stride + column[None, :]
    tl.store(target, narrow(total, out_ptr.dtype.element_ty, EXACT), mask=wanted[:, None] & (column < D)[None, :])


def find_places(
    slots_TK: Tensor,
    places: RowPlaces,
    *,
    slots_per_member: int,
    capacity: int,
) -> None:
    """Fill `places`; its flag `overflow` is raised if need be, and not put down."""
    num_rows, top_k = slots_TK.shape
    num_members, back_TJ = places.counts_R.shape[0], places.back_TJ
    assert places.rows_P.shape == (num_members * (1 + capacity),), (places.rows_P.shape, num_members, capacity)
    assert places.fits_TR.shape == (num_rows, num_members), (places.fits_TR.shape, num_rows, num_members)
    assert back_TJ.shape == (num_rows, min(top_k, num_members)), (back_TJ.shape, top_k, num_members)
    assert slots_TK.stride(1) == 1 or top_k == 1, slots_TK.stride()
    block_k = triton.next_power_of_2(top_k)
    places_kernel[(num_members,)](
        slots_TK, *places, num_rows, slots_TK.stride(0), slots_per_member,
        num_members, capacity, K=top_k, J=back_TJ.shape[1], BLOCK_T=128, BLOCK_K=block_k,
        BLOCK_J=triton.next_power_of_2(back_TJ.shape[1]),
    )  # fmt: skip


def pack(row: RowFormat, rows: Rows, order_N: Tensor, packed_NB: Tensor) -> None:
    """Rows in this order (int64) into packed rows; number T stands for none, and gets slots of -1."""
    num_rows, (num_places,) = rows.slots_NK.shape[0], order_N.shape
    fields = row.fields(packed_NB)
    assert rows.values_NX.dtype == fields.values_NX.dtype, (rows.values_NX.dtype, fields.values_NX.dtype)
    assert all(values.dim() < 2 or values.stride(1) == 1 or values.shape[1] == 1 for values in (*rows, *fields))
    if num_places == 0:
        return
    num_words, block_n = fields.values_NX.shape[1], _rows_at_once(packed_NB)
    block_x = min(triton.next_power_of_2(num_words), 1024)
    pack_kernel[triton.cdiv(num_places, block_n), triton.cdiv(num_words, block_x)](
        order_N, *rows, *fields, num_places, num_rows,
        *(values.stride(0) for values in rows), *(values.stride(0) for values in fields),
        K=row.top_k, X=num_words, BLOCK_N=block_n, BLOCK_K=triton.next_power_of_2(row.top_k), BLOCK_X=block_x,
    )  # fmt: skip


def add_rows(sums: Sums, out_ND: Tensor, *, zeros: bool) -> None:
    """Fill `out`, adding in the wide dtype. A result without rows is zeros, or is left as it is with `zeros` false."""
    rows_MD, index_NJ, weights_NJ, _ = sums
    num_out, width = out_ND.shape
    assert rows_MD.shape[1] == width, (rows_MD.shape, out_ND.shape)
    assert index_NJ.shape[0] == num_out, (index_NJ.shape, out_ND.shape)
    assert weights_NJ is None or weights_NJ.shape == index_NJ.shape, (weights_NJ, index_NJ.shape)
    assert rows_MD.stride(1) == out_ND.stride(1) == 1, "columns must lie side by side"
    assert index_NJ.stride(1) == 1 or index_NJ.shape[1] == 1, index_NJ.stride()
    if num_out == 0:
        return
    block_n, block_d = _rows_at_once(out_ND), min(triton.next_power_of_2(width), 1024)
    add_kernel[triton.cdiv(num_out, block_n), triton.cdiv(width, block_d)](
        rows_MD, index_NJ, weights_NJ, out_ND, num_out, rows_MD.stride(0), index_NJ.stride(0),
        weights_NJ.stride(0) if weights_NJ is not None else 0, out_ND.stride(0),
        D=width, J=index_NJ.shape[1], WEIGHED=weights_NJ is not None, ZEROS=zeros,
        WIDE=tl.float64 if rows_MD.dtype == torch.float64 else tl.float32,
        BLOCK_N=block_n, BLOCK_D=block_d, EXACT=not out_ND.is_cuda,
    )  # fmt: skip


def _rows_at_once(values: Tensor) -> int:
    return 1 if values.is_cuda else INTERPRETED_ROWS
