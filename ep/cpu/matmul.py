"""Matmuls in bf16 on a processor: groups of rows, each with a weight of its own, in one call.

A linear layer is one group; a layer's experts are a group for each slot that got rows; heads are groups of all rows.
Weights are packed once (see `tile`), which is a copy. A row's result does not depend on the other rows of a call.

Legend: T rows, K inputs, N outputs, F outputs of a gated pair, G groups, P panels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .calls import kernel
from .language import claim, halves, longs, narrow, narrowed, silu
from .tile import COLUMNS, LANES, ROWS, tile

__all__ = ["Packed", "multiply", "pack", "pack_gated"]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in panels."""

    panels_PKN: Tensor
    """[P, K / 2, COLUMNS, 2]"""
    num_outputs: int
    """N; past them panels hold zeros. Of a gated pair, F."""
    gated: bool = False


def pack(weight_NK: Tensor) -> Packed:
    """Of a linear layer. Asserts bfloat16."""
    return Packed(_panels(weight_NK), weight_NK.shape[0])


def pack_gated(gate_up_2FK: Tensor) -> Packed:
    """Of gate and up [2F, K], gate first. Half of a panel is gate, the other half up of the same F."""
    halves_2FK = gate_up_2FK.unflatten(0, (2, -1))
    num_outputs = halves_2FK.shape[1]
    padded_2FK = functional.pad(halves_2FK, (0, 0, 0, -num_outputs % LANES))
    mixed_FK = padded_2FK.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)
    return Packed(_panels(mixed_FK), num_outputs, gated=True)


def _panels(weight_NK: Tensor) -> Tensor:
    assert weight_NK.dtype is torch.bfloat16, f"{weight_NK.dtype} where bfloat16 is packed"
    padded_NK = functional.pad(weight_NK, (0, weight_NK.shape[1] % 2, 0, -weight_NK.shape[0] % COLUMNS))
    return padded_NK.unflatten(0, (-1, COLUMNS)).unflatten(2, (-1, 2)).transpose(1, 2).contiguous()


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

    Packed weights of several groups lie one after the other, P panels each. Without `starts_G` every group multiplies
    all its rows. With it x and out are of one group, [1, .., ..], and group g fills rows starts[g] to starts[g + 1] of
    out from as many rows of x, or from those that `rows_M` names (both int64). The last side of x and out is dense.
    """
    if x_GTK.shape[2] % 2:
        x_GTK = functional.pad(x_GTK, (0, 1))
    num_groups = x_GTK.shape[0] if starts_G is None else starts_G.shape[0] - 1
    num_panels, num_pairs = packed.panels_PKN.shape[0] // num_groups, packed.panels_PKN.shape[1]
    assert x_GTK.shape[2] == 2 * num_pairs, f"rows of {x_GTK.shape[2]} for weights of {2 * num_pairs} inputs"
    assert x_GTK.stride(2) == 1 == out_GTN.stride(2), (x_GTK.stride(), out_GTN.stride())
    if not x_GTK.shape[1]:
        return
    chunk = max(1, num_groups * num_panels // _PIECES)
    chunks = -(-num_panels // min(chunk, num_panels))
    chunk = -(-num_panels // chunks)
    _multiply_kernel(
        num_groups * chunks,
        x_GTK.data_ptr(),
        2 * x_GTK.stride(1),
        2 * x_GTK.stride(0),
        0 if rows_M is None else rows_M.data_ptr(),
        packed.panels_PKN.data_ptr(),
        num_panels,
        num_pairs,
        0 if starts_G is None else starts_G.data_ptr(),
        x_GTK.shape[1],
        out_GTN.data_ptr(),
        2 * out_GTN.stride(1),
        2 * out_GTN.stride(0),
        packed.num_outputs,
        packed.gated,
        chunk,
        chunks,
    )


_PIECES = 16
"""About so many pieces of work a call, where there are no more groups: some for each of a few threads."""


@kernel
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
                        to = halves(out + (row + m) * out_row)
                        for n in range(min(LANES, num_outputs - begin_n)):
                            gate, up = sums[m * COLUMNS + n], sums[m * COLUMNS + LANES + n]
                            to[begin_n + n] = narrow(silu(narrowed(gate)) * narrowed(up))
                else:
                    begin_n = panel * COLUMNS
                    for m in range(some):
                        to = halves(out + group * out_group + (row + m) * out_row)
                        for n in range(min(COLUMNS, num_outputs - begin_n)):
                            to[begin_n + n] = narrow(sums[m * COLUMNS + n])
