"""What a MoE layer computes on a processor in bf16, in kernels compiled by Numba (see `ep.cpu`). Needs numba.

Experts' weights are packed when they are first asked for, which is a copy. The bank stays what experts are moved from
and to: a slot that was written since is packed anew.

Legend: T tokens here, D model, E experts, K top-k, F expert hidden, N rows received, M (row, slot) pairs received.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ep import Arrivals, PairRows
from ep.cpu.matmul import linear, multiply
from ep.cpu.panels import Packed, pack, pack_gated

from .config import MoeConfig
from .cpu_kernels import Grouped, choose_experts, group_pairs
from .experts import ExpertBank, Mlp
from .ops import Computed, Routed
from .placement import PlacementTable

__all__ = ["NumbaOps", "PackedBank"]

K = TypeVar("K")
P = TypeVar("P")


class NumbaOps:
    """See `ops.MoeOps`."""

    def __init__(self, *, comm_sms: int = 0) -> None:  # noqa: ARG002  # a GPU's
        self._banks: dict[int, PackedBank] = {}
        self._mlps: dict[int, PackedMlp] = {}

    def route(
        self,
        x_TD: Tensor,
        gate_ED: Tensor,
        bias_E: Tensor | None,
        config: MoeConfig,
        *,
        table: PlacementTable,
        rank: int,
        positions_T: Tensor,
    ) -> Routed:
        shape = (x_TD.shape[0], config.top_k)
        routed = Routed(
            slots_TK=torch.empty(shape, dtype=torch.int64),
            weights_TK=torch.empty(shape),
            experts_TK=torch.empty(shape, dtype=torch.int64),
            counts_E=torch.zeros(config.num_experts, dtype=torch.int64),
        )
        fill = routed._asdict()
        choose_experts(x_TD, gate_ED, bias_E, config, table, rank=rank, positions_T=positions_T, **fill)
        return routed

    def mlp(self, x_TD: Tensor, mlp: Mlp) -> Tensor:
        return _found(self._mlps, mlp, PackedMlp)(x_TD)

    def experts(self, arrivals: Arrivals, bank: ExpertBank, *, rows_per_slot: float) -> Computed:  # noqa: ARG002
        packed = _found(self._banks, bank, PackedBank)
        grouped = group_pairs(arrivals.slots_NK, bank.num_slots)
        num_pairs = int(grouped.starts_L[-1])
        y_MD = packed.apply(arrivals.x_ND, grouped, num_pairs)
        return Computed(PairRows(y_MD, grouped.places_NK), num_pairs)


class PackedMlp:
    """A gated MLP of its own. Weights must not change afterwards."""

    def __init__(self, mlp: Mlp) -> None:
        assert mlp.scales is None, "an MLP in fp8 where bfloat16 is packed"
        self.source = mlp  # kept: nothing else can get its id
        self._gate_up, self._down = pack_gated(mlp.gate_up_2FD), pack(mlp.down_DF)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D]. T may be 0."""
        return linear(linear(x_TD, self._gate_up), self._down)


class PackedBank:
    """The local slots of one layer, one after the other."""

    def __init__(self, bank: ExpertBank) -> None:
        assert bank.scales is None, "experts in fp8 where bfloat16 is packed"
        self.source = bank
        self._seen = bank.times_written.copy()
        num_slots, width, self._hidden = bank.down_LDF.shape
        self._gate_up = Packed.empty(num_slots, self._hidden, width, gated=True)
        self._down = Packed.empty(num_slots, width, self._hidden)
        for slot in range(num_slots):
            self._fill(slot)

    def apply(self, x_ND: Tensor, grouped: Grouped, num_pairs: int) -> Tensor:
        """[M, D]: the row of each place through its slot's expert, not weighted."""
        if self._seen != self.source.times_written:
            for slot in self.source.times_written - self._seen:
                self._fill(slot)
            self._seen = self.source.times_written.copy()
        act_MF, y_MD = x_ND.new_empty(num_pairs, self._hidden), x_ND.new_empty(num_pairs, x_ND.shape[1])
        starts_L, act_1MF = grouped.starts_L, act_MF.unsqueeze(0)
        multiply(x_ND.unsqueeze(0), self._gate_up, act_1MF, starts_G=starts_L, rows_M=grouped.rows_M)
        multiply(act_1MF, self._down, y_MD.unsqueeze(0), starts_G=starts_L)
        return y_MD

    def _fill(self, slot: int) -> None:
        gate_up_2FD, down_DF = self.source.slot_weights(slot, torch.bfloat16)
        self._gate_up.fill(slot, gate_up_2FD)
        self._down.fill(slot, down_DF)


def _found(known: dict[int, P], source: K, pack: Callable[[K], P]) -> P:
    # Whatever is packed keeps its source, so that no other object can get its id.
    if id(source) not in known:
        known[id(source)] = pack(source)
    return known[id(source)]
