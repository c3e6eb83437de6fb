"""Weights in panels, the order in which `tile` reads them; packed once, which is a copy.

A panel is COLUMNS outputs wide, inputs in pairs, output by output; what is missing of a panel or a pair is zeros:

    panel[k] = w[0, 2k] w[0, 2k+1]  w[1, 2k] w[1, 2k+1]  ..  w[31, 2k] w[31, 2k+1]       128 bytes

Gate and up of a gated MLP are multiplied together: half of a panel is gate, the other half up of the same outputs.

Legend: K inputs, N outputs, F outputs of a gated pair, G groups of weights alike, P panels of all groups.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["COLUMNS", "LANES", "Packed", "pack", "pack_gated", "packed_bytes"]

LANES = 16
COLUMNS = 2 * LANES
"""Outputs of a panel."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The weights of `num_groups` linear layers of one shape, or of as many gated pairs."""

    panels_PKN: Tensor
    """bf16 [P, K / 2, COLUMNS, 2]"""
    num_groups: int
    num_outputs: int
    """N, or F."""
    gated: bool

    @classmethod
    def empty(cls, num_groups: int, num_outputs: int, num_inputs: int, *, gated: bool = False) -> Packed:
        """Room for weights."""
        num_panels = -(-num_outputs // (LANES if gated else COLUMNS))
        panels_PKN = torch.empty(num_groups * num_panels, -(-num_inputs // 2), COLUMNS, 2, dtype=torch.bfloat16)
        _ask_for_huge_pages(panels_PKN)
        return cls(panels_PKN, num_groups, num_outputs, gated)

    def fill(self, group: int, weight_NK: Tensor) -> None:
        """One group's weight [N, K]; of a gated pair [2F, K], gate first. Asserts bfloat16."""
        assert weight_NK.dtype is torch.bfloat16, f"{weight_NK.dtype} where bfloat16 is packed"
        if self.gated:
            halves_2FK = weight_NK.unflatten(0, (2, -1))
            padded_2FK = functional.pad(halves_2FK, (0, 0, 0, -self.num_outputs % LANES))
            weight_NK = padded_2FK.unflatten(1, (-1, LANES)).transpose(0, 1).flatten(0, 2)
        num_outputs, num_inputs = weight_NK.shape
        padded_NK = functional.pad(weight_NK, (0, num_inputs % 2, 0, -num_outputs % COLUMNS))
        panels = self.panels_PKN.unflatten(0, (self.num_groups, -1))[group]
        panels.copy_(padded_NK.unflatten(0, (-1, COLUMNS)).unflatten(2, (-1, 2)).transpose(1, 2))


def pack(*weights_NK: Tensor) -> Packed:
    """Of linear layers of one shape."""
    return _filled(Packed.empty(len(weights_NK), *weights_NK[0].shape), weights_NK)


def pack_gated(*gate_up_2FK: Tensor) -> Packed:
    """Of gate and up, gate first."""
    double, num_inputs = gate_up_2FK[0].shape
    return _filled(Packed.empty(len(gate_up_2FK), double // 2, num_inputs, gated=True), gate_up_2FK)


def packed_bytes(num_outputs: int, num_inputs: int, *, gated: bool = False) -> int:
    """Bytes of one group."""
    num_panels = -(-num_outputs // (LANES if gated else COLUMNS))
    return num_panels * -(-num_inputs // 2) * 2 * COLUMNS * torch.bfloat16.itemsize


_HUGE_PAGE = 2 << 20


def _ask_for_huge_pages(room: Tensor) -> None:
    """Weights are read from one end to the other: with ordinary pages a processor looks up addresses for up to a fifth
    of that time. Advice, which the system may ignore; memory beside is advised with it, where a page reaches there."""
    begin = room.data_ptr() // _HUGE_PAGE * _HUGE_PAGE
    end = -(-(room.data_ptr() + room.nbytes) // _HUGE_PAGE) * _HUGE_PAGE
    if room.nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def _filled(packed: Packed, weights: tuple[Tensor, ...]) -> Packed:
    for group, weight in enumerate(weights):
        packed.fill(group, weight)
    return packed
