"""Experts in the layout that oneDNN's bf16 matmuls read, packed slot by slot when a slot is first asked for.

Given a weight as checkpoints have it oneDNN rearranges it in every call, at the cost of reading it twice more. What is
packed is a copy, opaque and on the CPU only; the bank stays what experts are moved from and to, and a slot that was
written since is packed anew.

Legend: M (row, slot) pairs received, D model, F expert hidden, L local slots, T tokens here.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from .experts import ExpertBank, Mlp

__all__ = ["PackedBank", "PackedMlp", "PackedOnce"]

K = TypeVar("K")
P = TypeVar("P")


def _linear(x_TD: Tensor, packed: Tensor) -> Tensor:
    """[T, N] of a weight [N, D] that `_pack` has packed; T is at least 1."""
    return torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")


class PackedMlp:
    """A gated MLP of its own."""

    def __init__(self, mlp: Mlp) -> None:
        self.source = mlp
        self._gate_up, self._down = _pack(mlp.gate_up_2FD), _pack(mlp.down_DF)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D]. T may be 0."""
        if not x_TD.shape[0]:
            return x_TD.new_empty(x_TD.shape)
        return _linear(_gated(_linear(x_TD, self._gate_up)), self._down)


class PackedBank:
    """The local slots of one layer."""

    def __init__(self, bank: ExpertBank) -> None:
        assert bank.scales is None, "experts in fp8 where oneDNN packs bfloat16"
        self.source = bank
        self._slots: dict[int, tuple[int, Tensor, Tensor]] = {}

    def apply(self, x_ND: Tensor, rows_M: Tensor, slots_M: Tensor) -> Tensor:
        """`ExpertBank.apply`: rows are gathered once, and what is not a matmul is done for all slots together.

        slots_M   2 0 2 0  ->  order_M  1 3 | 0 2  ->  slot 0 multiplies its two rows, slot 2 its two
        """
        if not slots_M.shape[0]:
            return x_ND.new_empty(0, x_ND.shape[1])
        order_M = torch.argsort(slots_M, stable=True)
        sorted_MD = x_ND.index_select(0, rows_M.index_select(0, order_M))
        counts_L = torch.bincount(slots_M, minlength=self.source.num_slots).tolist()
        asked = [(count, *self._slot(slot)) for slot, count in enumerate(counts_L) if count]
        counts, gate_ups, downs = zip(*asked, strict=True)
        act_MF = _gated(_by_slot(sorted_MD, counts, gate_ups))
        y_MD = torch.empty_like(sorted_MD)
        return y_MD.index_copy_(0, order_M, _by_slot(act_MF, counts, downs))

    def _slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """(gate_up, down), packed."""
        times = self.source.times_written[slot]
        held = self._slots.get(slot)
        if held is None or held[0] != times:
            weights = self.source.slot_weights(slot, torch.bfloat16)
            held = self._slots[slot] = times, _pack(weights[0]), _pack(weights[1])
        return held[1], held[2]


class PackedOnce:
    """What was packed of banks and MLPs, by object: they live as long as a decoder does."""

    def __init__(self) -> None:
        self._banks: dict[int, PackedBank] = {}
        self._mlps: dict[int, PackedMlp] = {}

    def bank(self, bank: ExpertBank) -> PackedBank:
        return _found(self._banks, bank, PackedBank)

    def mlp(self, mlp: Mlp) -> PackedMlp:
        return _found(self._mlps, mlp, PackedMlp)


def _found(known: dict[int, P], source: K, pack: Callable[[K], P]) -> P:
    # Whatever is packed keeps its source, so that no other object can get its id.
    if id(source) not in known:
        known[id(source)] = pack(source)
    return known[id(source)]


def _by_slot(rows_MX: Tensor, counts: Sequence[int], packed: Sequence[Tensor]) -> Tensor:
    """Rows in slot order, each slot's times its own weight."""
    return torch.cat(list(map(_linear, rows_MX.split_with_sizes(counts), packed)))


def _gated(gate_up_M2F: Tensor) -> Tensor:
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=1)
    return functional.silu(gate_MF).mul_(up_MF)


def _pack(weight_ND: Tensor) -> Tensor:
    assert weight_ND.dtype is torch.bfloat16, f"{weight_ND.dtype} where oneDNN packs bfloat16"
    return torch.ops.mkldnn._reorder_linear_weight(weight_ND, None)
