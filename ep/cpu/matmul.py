"""Matmuls in bf16 on a processor: groups of rows, each with a weight of its own, in one call.

A linear layer is one group; a layer's experts are a group for each slot that got rows; heads are groups of all rows.
Weights are packed (see `panels`). A row's result does not depend on the other rows of a call.

Legend: T rows, K inputs, N outputs, F outputs of a gated pair, G groups, M places.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from .calls import kernel
from .language import INLINE, claim, floats, halves, longs, narrow, narrow_lanes, narrowed, silu
from .panels import COLUMNS, LANES, Packed
from .tile import ROWS, tile

__all__ = ["linear", "logits", "multiply"]


def linear(x_TK: Tensor, packed: Packed) -> Tensor:
    """[T, N] in bf16; T may be 0. Of a gated pair [T, F]: silu(gate(x)) * up(x)."""
    out_TN = x_TK.new_empty(x_TK.shape[0], packed.num_outputs)
    multiply(x_TK.unsqueeze(0), packed, out_TN.unsqueeze(0))
    return out_TN


def logits(x_TK: Tensor, packed: Packed) -> Tensor:
    """[T, N] in float32: the sums as they are."""
    out_TN = torch.empty(x_TK.shape[0], packed.num_outputs)
    multiply(x_TK.unsqueeze(0), packed, out_TN.unsqueeze(0))
    return out_TN


def multiply(
    x_GTK: Tensor,
    packed: Packed,
    out_GTN: Tensor,
    *,
    starts_G: Tensor | None = None,
    rows_M: Tensor | None = None,
) -> None:
    """Fill out: every group's rows times its weight; what has no row in any group stays as it is.

    Without `starts_G` every group multiplies all its rows. With it x and out are of one group, [1, .., ..], and group g
    fills rows starts[g] to starts[g + 1] of out from as many rows of x, or from those that `rows_M` names (both int64).
    The last side of x and out is dense. Out is bf16, or float32 where nothing is gated.
    """
    if x_GTK.shape[2] % 2:
        x_GTK = functional.pad(x_GTK, (0, 1))
    by_group, size = starts_G is None, out_GTN.dtype.itemsize
    num_groups, num_pairs = packed.num_groups, packed.panels_PKN.shape[1]
    num_panels = packed.panels_PKN.shape[0] // num_groups
    assert num_groups == (x_GTK.shape[0] if starts_G is None else starts_G.shape[0] - 1), (num_groups, x_GTK.shape)
    assert x_GTK.shape[2] == 2 * num_pairs, f"rows of {x_GTK.shape[2]} for weights of {2 * num_pairs} inputs"
    assert x_GTK.stride(2) == 1 == out_GTN.stride(2), (x_GTK.stride(), out_GTN.stride())
    if not x_GTK.shape[1]:
        return
    chunk = min(max(1, num_groups * num_panels // _PIECES), num_panels)
    chunks = -(-num_panels // chunk)
    _multiply_kernel(
        num_groups * chunks,
        x_GTK.data_ptr(),
        2 * x_GTK.stride(1),
        2 * x_GTK.stride(0) * by_group,
        0 if rows_M is None else rows_M.data_ptr(),
        packed.panels_PKN.data_ptr(),
        num_panels,
        num_pairs,
        0 if starts_G is None else starts_G.data_ptr(),
        x_GTK.shape[1],
        out_GTN.data_ptr(),
        size * out_GTN.stride(1),
        size * out_GTN.stride(0) * by_group,
        packed.num_outputs,
        _GATED if packed.gated else _WIDE if size == 4 else _PLAIN,
        chunk,
        chunks,
    )


_PIECES = 16
"""About so many pieces of work a call, where there are no more groups: some for each of a few threads."""


@njit(**INLINE)
def _put(sums, out, first, num_outputs):
    """A panel's sums of one row, in bf16."""
    if first + COLUMNS <= num_outputs:
        for vector in range(COLUMNS // LANES):
            narrow_lanes(sums + vector * LANES * 4, out + (first + vector * LANES) * 2)
    else:
        for n in range(num_outputs - first):
            halves(out)[first + n] = narrow(floats(sums)[n])


@njit(**INLINE)
def _put_wide(sums, out, first, num_outputs):
    """The same, as they are."""
    for n in range(min(COLUMNS, num_outputs - first)):
        floats(out)[first + n] = floats(sums)[n]


@njit(**INLINE)
def _put_gated(sums, out, first, num_outputs):
    """The same, the second half times what is left of the first."""
    gates, ups = floats(sums), floats(sums + LANES * 4)
    for n in range(LANES):
        gates[n] = silu(narrowed(gates[n])) * narrowed(ups[n])
    if first + LANES <= num_outputs:
        narrow_lanes(sums, out + first * 2)
    else:
        for n in range(num_outputs - first):
            halves(out)[first + n] = narrow(gates[n])


_PLAIN, _GATED, _WIDE = range(3)
"""What becomes of sums: bf16, bf16 of a gated pair, float32."""


@kernel()
def _multiply_kernel(args):
    x, x_row, x_group, rows_M = args[2], args[3], args[4], args[5]
    weights, num_panels, num_pairs, starts_G, num_rows = args[6], args[7], args[8], args[9], args[10]
    out, out_row, out_group, num_outputs, form = args[11], args[12], args[13], args[14], args[15]
    chunk, chunks = args[16], args[17]
    panel_bytes = num_pairs * COLUMNS * 4
    addresses, sums = np.empty(ROWS, np.int64), np.empty(ROWS * COLUMNS, np.float32)
    while True:
        piece = claim(args)
        if piece >= args[1]:
            return
        group, first = piece // chunks, piece % chunks * chunk
        begin, end = 0, num_rows
        if starts_G:
            begin, end = longs(starts_G)[group], longs(starts_G)[group + 1]
        for panel in range(first, min(first + chunk, num_panels)):
            weight = weights + (group * num_panels + panel) * panel_bytes
            row, tiles = begin, (end - begin + ROWS - 1) // ROWS
            while tiles > 0:  # of about the same size
                some = (end - row + tiles - 1) // tiles
                for m in range(some):
                    source = longs(rows_M)[row + m] if rows_M else row + m
                    addresses[m] = x + group * x_group + source * x_row
                tile(some, addresses.ctypes.data, weight, num_pairs, sums.ctypes.data)
                for m in range(some):
                    source, to = sums.ctypes.data + m * COLUMNS * 4, out + group * out_group + (row + m) * out_row
                    if form == _GATED:
                        _put_gated(source, to, panel * LANES, num_outputs)
                    elif form == _WIDE:
                        _put_wide(source, to, panel * COLUMNS, num_outputs)
                    else:
                        _put(source, to, panel * COLUMNS, num_outputs)
                row, tiles = row + some, tiles - 1
