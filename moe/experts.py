"""The bank: the weights of one rank's local slots, and what they do to the rows that arrived.

Knows slots 0..L-1 only: not which expert sits in one, not where rows come from, not their combine weights. To whoever
moves an expert, a slot is its *blob*: the bytes of all its tensors one after the other, scales included.

Legend: N rows received, M (row, slot) pairs received, D model, F expert hidden, L local slots; f, d blocks of F and D;
B bytes of a blob.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .quant import dequantize_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Scales:
    """Float32 block scales of a bank kept in fp8. Gate and up have blocks of their own: F need not fill its last."""

    gate_up_L2fd: Tensor
    """[L, 2, ceil(F / 128), ceil(D / 128)]"""
    down_Ldf: Tensor
    """[L, ceil(D / 128), ceil(F / 128)]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBank:
    """Weights of L slots, stacked. An empty slot's weights are never read."""

    gate_up_L2FD: Tensor
    """[L, 2F, D], gate rows first; run dtype, or fp8 with `scales`."""
    down_LDF: Tensor
    """[L, D, F]"""
    scales: Fp8Scales | None = None
    times_written: Counter[int] = field(default_factory=Counter)
    """By slot: how often `write_blob` has replaced it, for whoever keeps something made of its weights."""

    def __post_init__(self) -> None:
        num_slots, double, hidden = self.gate_up_L2FD.shape
        expected = (num_slots, hidden, double // 2)
        assert self.down_LDF.shape == expected, f"down {tuple(self.down_LDF.shape)}, gate_up wants {expected}"
        is_fp8 = self.gate_up_L2FD.dtype.itemsize == 1
        assert is_fp8 == (self.scales is not None), f"{self.gate_up_L2FD.dtype} bank, scales {self.scales is not None}"

    @property
    def num_slots(self) -> int:
        return self.gate_up_L2FD.shape[0]

    @property
    def blob_bytes(self) -> int:
        """B, the same for every slot."""
        return sum(tensor[:1].nbytes for tensor in _tensors(self))

    def blob(self, slot: int) -> Tensor:
        """uint8 [B], a copy: what `write_blob` takes."""
        return torch.cat(self._bytes_of(slot))

    def write_blob(self, slot: int, blob_B: Tensor) -> None:
        """Overwrite one slot in place, scales and all."""
        assert blob_B.shape == (self.blob_bytes,), f"{tuple(blob_B.shape)} bytes for slots of {self.blob_bytes}"
        parts = self._bytes_of(slot)
        for part, values in zip(parts, blob_B.split([part.shape[0] for part in parts]), strict=True):
            part.copy_(values)
        self.times_written[slot] += 1

    def parts(self, slot: int, begin: int, out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Which part of uint8 `out` is a copy of which part of the slot: its blob from byte `begin` on, as views."""
        views = []
        for part in self._bytes_of(slot):
            first, last = max(begin, 0), min(begin + out.shape[0], part.shape[0])
            if first < last:
                views.append((out[first - begin : last - begin], part[first:last]))
            begin -= part.shape[0]
        return views

    def _bytes_of(self, slot: int) -> list[Tensor]:
        """Every tensor of a slot as a flat uint8 view."""
        return [tensor[slot].view(-1).view(torch.uint8) for tensor in _tensors(self)]

    def slot_weights(self, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(gate_up [2F, D], down [D, F]) of one slot: views in the run dtype, or dequantised copies of fp8."""
        gate_up_2FD, down_DF = self.gate_up_L2FD[slot], self.down_LDF[slot]
        if self.scales is None:
            return gate_up_2FD, down_DF
        halves = gate_up_2FD.unflatten(0, (2, -1))
        gate_up_2FD = dequantize_blocks(halves, self.scales.gate_up_L2fd[slot], dtype).flatten(0, 1)
        return gate_up_2FD, dequantize_blocks(down_DF, self.scales.down_Ldf[slot], dtype)

    def apply(self, x_ND: Tensor, rows_M: Tensor, slots_M: Tensor) -> Tensor:
        """[M, D] in x's dtype, in pair order: expert `slots_M` of row `rows_M`, not weighted.

        Pairs are sorted by slot once, so that each slot that got any has one slice of them:

            slots_M   2 0 2 0  ->  order_M  1 3 | 0 2  ->  slot 0 pairs [1 3], slot 2 pairs [0 2]

        A slot's rows are gathered into memory of their own and not cut out of a sorted copy of all rows: BLAS may round
        by the alignment of what it gets, and a row's result must not depend on which other experts sit on the rank.
        """
        order_M = torch.argsort(slots_M, stable=True)
        sorted_rows_M = rows_M.index_select(0, order_M)
        y_MD = x_ND.new_empty(rows_M.shape[0], x_ND.shape[1])
        stop = 0
        for slot, count in enumerate(torch.bincount(slots_M, minlength=self.num_slots).tolist()):
            if count:
                start, stop = stop, stop + count
                part_ND = x_ND.index_select(0, sorted_rows_M[start:stop])
                y_MD.index_copy_(0, order_M[start:stop], gated_mlp(part_ND, *self.slot_weights(slot, x_ND.dtype)))
        return y_MD


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """A gated MLP: a dense layer's, or the shared experts fused into one."""

    gate_up_2FD: Tensor
    """[2F, D], gate rows first; run dtype, or fp8 with `scales`."""
    down_DF: Tensor
    scales: Fp8Scales | None = None
    """Of one slot."""

    @property
    def bank(self) -> ExpertBank:
        """The same as the only slot of a bank."""
        gate_up_L2FD, down_LDF = self.gate_up_2FD.unsqueeze(0), self.down_DF.unsqueeze(0)
        return ExpertBank(gate_up_L2FD=gate_up_L2FD, down_LDF=down_LDF, scales=self.scales)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D] in x's dtype, in torch."""
        if self.scales is None:
            return gated_mlp(x_TD, self.gate_up_2FD, self.down_DF)
        return gated_mlp(x_TD, *self.bank.slot_weights(0, x_TD.dtype))


def _tensors(holder: Any) -> Iterator[Tensor]:
    """Every tensor of a dataclass and of those in it, in field order: a new one cannot be left behind in a move."""
    for each in fields(holder):
        value = getattr(holder, each.name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def gated_mlp(x_TD: Tensor, gate_up_2FD: Tensor, down_DF: Tensor) -> Tensor:
    """[T, D]: down(silu(gate(x)) * up(x)), all in x's dtype."""
    gate_TF, up_TF = functional.linear(x_TD, gate_up_2FD).chunk(2, dim=1)
    return functional.linear(functional.silu(gate_TF) * up_TF, down_DF)
