"""The experts' matmuls on a GPU: a grouped gated MLP over local slots, two kernels whose work follows the valid rows.

    gate_up   x rows of a slot x [gate; up]  ->  silu(gate) * up, quantised again where the bank is fp8
    down      those x down                   ->  y

Counts are read on the device. Programs stay and take tiles in turn, slot after slot: all row tiles of a tile of
weights one after the other, so that weights come from memory once and from L2 then. Operands are swapped: weights are
the matrix whose side of a tile must be at least 64 in Hopper's matmul units, rows the one that may have 16, so that few
rows do not make empty work. Every product is added in one order, along D or F, without a split: a row's result depends
on its own values and its slot's weights.

With fp8, products of 128 columns are added in the tensor cores and then scaled into a float32 sum, the scale of the
weights' block times that of the row's (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.2).

Numbers of rows, which change from step to step, are not specialised: nothing is compiled while it runs.

Legend: N rows received, M places of pairs (sorted by slot), D model, F expert hidden, L local slots; f, d blocks of F
and D.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (Triton's own language is typed as plain Python.)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep.kernel_casts import narrow
from ep.quant_kernels import block_scales, to_fp8

from .experts import ExpertBank
from .pairs import PairGroups
from .quant import BLOCK


class Tiling(NamedTuple):
    """How a kernel is cut: rows of a tile, and what the compiler is told of one."""

    rows: int
    num_warps: int
    num_stages: int


TILINGS: dict[int, Tiling] = {rows: Tiling(rows, 8, 4) for rows in (16, 32, 64)}
"""By the rows of a tile. Results do not depend on it. With 128 rows, two sums in fp8 do not fit the registers."""


def tiling_for(rows_per_slot: float) -> Tiling:
    """The smallest tile that holds what a slot gets on average, so that its weights are read once: 20 -> 32."""
    return TILINGS[next((rows for rows in TILINGS if rows >= rows_per_slot), max(TILINGS))]


@triton.jit
def _row_tiles(starts_ptr, num_slots, ROWS: tl.constexpr, BLOCK_L: tl.constexpr):
    """[BLOCK_L] tiles of rows of each slot: starts [0, 3, 3, 4], ROWS 2 -> [2, 0, 1, 0]."""
    slots = tl.arange(0, BLOCK_L)
    begins = tl.load(starts_ptr + slots, mask=slots < num_slots, other=0)
    ends = tl.load(starts_ptr + 1 + slots, mask=slots < num_slots, other=0)
    return (ends - begins + ROWS - 1) // ROWS


@triton.jit
def _find_tile(tile, starts_ptr, row_tiles_L, TILES: tl.constexpr, ROWS: tl.constexpr):
    """(slot, tile of its weights, first place, end of the slot's places) of a tile.

    starts [0, 3, 3, 4], ROWS 2, TILES 2:

        tile     0   1   2   3  |  4   5
        slot     0   0   0   0  |  2   2
        weights  0   0   1   1  |  0   1
        places  0 1  2  0 1  2  |  3   3
    """
    slots = tl.arange(0, row_tiles_L.shape[0])
    ends_L = tl.cumsum(row_tiles_L) * TILES
    slot = tl.sum((ends_L <= tile).to(tl.int32))
    inner = tile - tl.max(tl.where(slots < slot, ends_L, 0))
    begin, end = tl.load(starts_ptr + slot), tl.load(starts_ptr + slot + 1)
    num_row_tiles = (end - begin + ROWS - 1) // ROWS
    return slot, inner // num_row_tiles, begin + inner % num_row_tiles * ROWS, end


@triton.jit
def _load(row_ptrs, column, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr):
    """Some columns of some rows, zeros past WIDTH; bfloat16 widened for the interpreter, which cannot multiply it."""
    if WIDTH % BLOCK_K == 0:
        values = tl.load(row_ptrs[:, None] + column[None, :])
    else:
        values = tl.load(row_ptrs[:, None] + column[None, :], mask=(column < WIDTH)[None, :], other=0.0)
    if EXACT and values.dtype == tl.bfloat16:
        values = values.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["num_slots"])
def gate_up_kernel(
    x_ptr, x_scale_ptr, rows_ptr, starts_ptr, w_ptr, w_scale_ptr, act_ptr, act_scale_ptr,
    x_stride, x_scale_stride, num_slots,
    D: tl.constexpr, F: tl.constexpr, FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, PROGRAMS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK features of gate and of up for ROWS places; with FP8 that is one block of the result's scales.

    D 2, F 1, slot 0 with gate [1, 0] and up [0, 1], its rows [[2, 3]]: silu(2) * 3 = 5.28.
    """
    TILES: tl.constexpr = (F + BLOCK - 1) // BLOCK
    BLOCKS_D: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row_tiles_L = _row_tiles(starts_ptr, num_slots, ROWS, BLOCK_L)
    for tile in range(tl.program_id(0), tl.sum(row_tiles_L) * TILES, PROGRAMS):
        slot, f_tile, first, end = _find_tile(tile, starts_ptr, row_tiles_L, TILES, ROWS)
        # Past the end, places and features are the last one again: nothing is masked but what is stored.
        place = first + tl.arange(0, ROWS)
        row = tl.load(rows_ptr + tl.minimum(place, end - 1)).to(tl.int64)
        feature = f_tile * BLOCK + tl.arange(0, BLOCK)
        gate_ptrs = w_ptr + (slot.to(tl.int64) * (2 * F) + tl.minimum(feature, F - 1)) * D
        scales = (slot * (2 * TILES) + f_tile) * BLOCKS_D
        gate = tl.full([BLOCK, ROWS], 0.0, tl.float32)
        up = tl.full([BLOCK, ROWS], 0.0, tl.float32)
        for start in range(0, D, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            x = _load(x_ptr + row * x_stride, column, D, BLOCK_K, EXACT)
            w_gate = _load(gate_ptrs, column, D, BLOCK_K, EXACT)
            w_up = _load(gate_ptrs + F * D, column, D, BLOCK_K, EXACT)
            if FP8:
                block = start // BLOCK
                x_scale = tl.load(x_scale_ptr + row * x_scale_stride + block)
                gate_scale = tl.load(w_scale_ptr + scales + block)
                up_scale = tl.load(w_scale_ptr + scales + TILES * BLOCKS_D + block)
                gate += tl.dot(w_gate, tl.trans(x), input_precision="ieee") * (gate_scale * x_scale)[None, :]
                up += tl.dot(w_up, tl.trans(x), input_precision="ieee") * (up_scale * x_scale)[None, :]
            else:
                gate += tl.dot(w_gate, tl.trans(x), input_precision="ieee")
                up += tl.dot(w_up, tl.trans(x), input_precision="ieee")
        act = gate / (1.0 + tl.exp(-gate)) * up
        target = act_ptr + place.to(tl.int64)[None, :] * F + feature[:, None]
        inside = (place < end)[None, :] & (feature < F)[:, None]
        if FP8:
            scale = block_scales(tl.max(tl.abs(act), axis=0), POWER_OF_TWO)
            tl.store(act_scale_ptr + place.to(tl.int64) * TILES + f_tile, scale, mask=place < end)
            tl.store(target, to_fp8(act, scale[None, :], EXACT), mask=inside)
        else:
            tl.store(target, narrow(act, act_ptr.dtype.element_ty, EXACT), mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def down_kernel(
    act_ptr, act_scale_ptr, starts_ptr, w_ptr, w_scale_ptr, y_ptr, num_slots,
    D: tl.constexpr, F: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, PROGRAMS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile is BLOCK columns of y for ROWS places.

    D 2, F 1, slot 0 with down [[1], [-1]], its act [[5]]: y [[5, -5]].
    """
    TILES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    BLOCKS_F: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row_tiles_L = _row_tiles(starts_ptr, num_slots, ROWS, BLOCK_L)
    for tile in range(tl.program_id(0), tl.sum(row_tiles_L) * TILES, PROGRAMS):
        slot, d_tile, first, end = _find_tile(tile, starts_ptr, row_tiles_L, TILES, ROWS)
        place = first + tl.arange(0, ROWS)
        row = tl.minimum(place, end - 1).to(tl.int64)
        column = d_tile * BLOCK + tl.arange(0, BLOCK)
        w_ptrs = w_ptr + (slot.to(tl.int64) * D + tl.minimum(column, D - 1)) * F
        scales = (slot * TILES + d_tile) * BLOCKS_F
        y = tl.full([BLOCK, ROWS], 0.0, tl.float32)
        for start in range(0, F, BLOCK_K):
            feature = start + tl.arange(0, BLOCK_K)
            act = _load(act_ptr + row * F, feature, F, BLOCK_K, EXACT)
            w = _load(w_ptrs, feature, F, BLOCK_K, EXACT)
            if FP8:
                block = start // BLOCK
                act_scale = tl.load(act_scale_ptr + row * BLOCKS_F + block)
                y += (
                    tl.dot(w, tl.trans(act), input_precision="ieee")
                    * (tl.load(w_scale_ptr + scales + block) * act_scale)[None, :]
                )
            else:
                y += tl.dot(w, tl.trans(act), input_precision="ieee")
        target = y_ptr + place.to(tl.int64)[None, :] * D + column[:, None]
        inside = (place < end)[None, :] & (column < D)[:, None]
        tl.store(target, narrow(y, y_ptr.dtype.element_ty, EXACT), mask=inside)


def gate_up(
    x_ND: Tensor,
    bank: ExpertBank,
    groups: PairGroups,
    act_MF: Tensor,
    *,
    tiling: Tiling,
    num_programs: int,
    x_scale_Nd: Tensor | None = None,
    act_scale_Mf: Tensor | None = None,
    power_of_two: bool = False,
) -> None:
    """Fill the places of `groups` in act_MF; the scales are there if, and only if, the bank is fp8."""
    num_slots, double, width = bank.gate_up_L2FD.shape
    is_fp8 = bank.scales is not None
    assert act_MF.shape == (groups.num_places, double // 2), (act_MF.shape, groups.num_places, double // 2)
    assert num_slots == groups.num_slots, (num_slots, groups.num_slots)
    assert is_fp8 == (x_scale_Nd is not None) == (act_scale_Mf is not None), "scales go with an fp8 bank"
    assert x_ND.dtype == bank.gate_up_L2FD.dtype, (x_ND.dtype, bank.gate_up_L2FD.dtype)
    _check_rows(x_ND, act_MF, bank.gate_up_L2FD)
    gate_up_kernel[(num_programs,)](
        x_ND, x_scale_Nd, groups.rows_M, groups.starts_L, bank.gate_up_L2FD,
        bank.scales.gate_up_L2fd if bank.scales else None, act_MF, act_scale_Mf,
        x_ND.stride(0), x_scale_Nd.stride(0) if x_scale_Nd is not None else 0, num_slots,
        D=width, F=double // 2, POWER_OF_TWO=power_of_two, **_cut(x_ND, num_slots, tiling, num_programs),
    )  # fmt: skip


def down(
    act_MF: Tensor,
    bank: ExpertBank,
    groups: PairGroups,
    y_MD: Tensor,
    *,
    tiling: Tiling,
    num_programs: int,
    act_scale_Mf: Tensor | None = None,
) -> None:
    """Fill the places of `groups` in y_MD, each with its own slot's result."""
    num_slots, width, hidden = bank.down_LDF.shape
    assert y_MD.shape == (groups.num_places, width), (y_MD.shape, groups.num_places, width)
    assert (bank.scales is not None) == (act_scale_Mf is not None), "scales go with an fp8 bank"
    assert act_MF.dtype == bank.down_LDF.dtype, (act_MF.dtype, bank.down_LDF.dtype)
    _check_rows(act_MF, y_MD, bank.down_LDF)
    down_kernel[(num_programs,)](
        act_MF, act_scale_Mf, groups.starts_L, bank.down_LDF, bank.scales.down_Ldf if bank.scales else None, y_MD,
        num_slots, D=width, F=hidden, **_cut(act_MF, num_slots, tiling, num_programs),
    )  # fmt: skip


def _check_rows(rows: Tensor, out: Tensor, weights: Tensor) -> None:
    assert rows.stride(1) == 1, f"a row's values must lie side by side, strides are {rows.stride()}"
    assert out.is_contiguous(), out.stride()
    assert weights.is_contiguous(), weights.stride()


def _cut(values: Tensor, num_slots: int, tiling: Tiling, num_programs: int) -> dict[str, int | bool]:
    """What both kernels are told of their tiles: 128 bytes of a row at a time, which with fp8 are one block."""
    assert values.dtype != torch.float64, "the experts' kernels add in float32"
    is_fp8 = values.dtype.itemsize == 1
    return {
        "FP8": is_fp8,
        "BLOCK": BLOCK,
        "BLOCK_K": BLOCK // values.dtype.itemsize,
        "ROWS": tiling.rows,
        "BLOCK_L": triton.next_power_of_2(num_slots),
        "PROGRAMS": num_programs,
        "EXACT": values.device.type == "cpu",
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
