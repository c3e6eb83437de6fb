"""Matmuls in bf16 on a processor: groups of rows, each with a weight of its own, in one call.

A linear layer is one group; a layer's experts are a group for each slot that got rows; heads are groups of all rows.
Weights are packed (see `panels`). A row's result does not depend on the other rows of a call.

Legend: T rows, K inputs, N outputs, F outputs of a gated pair, G groups, M places.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn import functional

from .calls import kernel
from .language import claim, halves, longs, narrow, narrowed, silu
from .panels import COLUMNS, LANES, Packed
from .tile import ROWS, tile

__all__ = ["linear", "multiply"]


def linear(x_TK: Tensor, packed: Packed) -> Tensor:
    """[T, N] in bf16; T may be 0. Of a gated pair [T, F]: silu(gate(x)) * up(x)."""
    out_TN = x_TK.new_empty(x_TK.shape[0], packed.num_outputs)
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
    The last side of x and out is dense.
    """
    if x_GTK.shape[2] % 2:
        x_GTK = functional.pad(x_GTK, (0, 1))
    by_group = starts_G is None
    num_groups, num_pairs = packed.num_groups, packed.panels_PKN.shape[1]
    num_panels = packed.panels_PKN.shape[0] // num_groups
    assert num_groups == (x_GTK.shape[0] if by_group else starts_G.shape[0] - 1), (num_groups, x_GTK.shape)
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
        2 * out_GTN.stride(1),
        2 * out_GTN.stride(0) * by_group,
        packed.num_outputs,
        packed.gated,
        chunk,
        chunks,
    )


_PIECES = 16
"""About so many pieces of work a call, where there are no more groups: some for each of a few threads."""


@kernel()
def _multiply_kernel(args):
    x, x_row, x_group, rows_M = args[2], args[3], args[4], args[5]
    weights, num_panels, num_pairs, starts_G, num_rows = args[6], args[7], args[8], args[9], args[10]
    out, out_row, out_group, num_outputs, gated = args[11], args[12], args[13], args[14], args[15]
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
            for row in range(begin, end, ROWS):
                some = min(ROWS, end - row)
                for m in range(some):
                    source = longs(rows_M)[row + m] if rows_M else row + m
                    addresses[m] = x + group * x_group + source * x_row
                tile(some, addresses.ctypes.data, weight, num_pairs, sums.ctypes.data)
                if gated:
                    begin_n = panel * LANES
                    for m in range(some):
                        to = halves(out + group * out_group + (row + m) * out_row)
                        for n in range(min(LANES, num_outputs - begin_n)):
                            gate, up = sums[m * COLUMNS + n], sums[m * COLUMNS + LANES + n]
                            to[begin_n + n] = narrow(silu(narrowed(gate)) * narrowed(up))
                else:
                    begin_n = panel * COLUMNS
                    for m in range(some):
                        to = halves(out + group * out_group + (row + m) * out_row)
                        for n in range(min(COLUMNS, num_outputs - begin_n)):
                            to[begin_n + n] = narrow(sums[m * COLUMNS + n])
