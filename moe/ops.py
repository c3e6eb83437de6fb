"""What a MoE layer computes on a device, behind one name: in torch, in Triton's kernels, or in Numba's.

Chosen once, at start. A float64 run has the reference only. Knows no order of things: that is the layer's.

Legend: T tokens here, D model, E experts, K top-k, F expert hidden, N rows received, M places of pairs, L local slots;
f, d blocks of F and D.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ep import Arrivals, PairRows
from ep.ops import import_kernels

from .config import MoeConfig
from .experts import ExpertBank, Mlp
from .pairs import PairGroups
from .placement import PlacementTable, choose_slots
from .quant import FP8, num_blocks
from .routing import count_experts, route


class Routed(NamedTuple):
    """Where T tokens go. A token of position -1 goes nowhere and is not counted."""

    slots_TK: Tensor
    """int64, -1 none."""
    weights_TK: Tensor
    """In the wide dtype."""
    experts_TK: Tensor
    """int64, -1 none."""
    counts_E: Tensor
    """int64 pairs of each expert."""


class Computed(NamedTuple):
    """What a rank's experts made of the rows that arrived."""

    rows: PairRows
    num_pairs: int | Tensor
    """Pairs that were computed; a tensor where the host does not know."""


class MoeOps(Protocol):
    """The parts of a layer."""

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
        """`routing.route` and `placement.choose_slots`."""
        ...

    def mlp(self, x_TD: Tensor, mlp: Mlp) -> Tensor:
        """[T, D]: `experts.gated_mlp`."""
        ...

    def experts(self, arrivals: Arrivals, bank: ExpertBank, *, rows_per_slot: float) -> Computed:
        """Each row's result of each of its slots, in the run dtype. `rows_per_slot`, about, decides how work is cut."""
        ...


class ReferenceOps:
    """In torch, on any device. The host waits for the device. Its kernels come and go, and leave room by themselves."""

    def __init__(self, *, comm_sms: int = 0) -> None:
        pass

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
        routing = route(x_TD, gate_ED, bias_E, config)
        experts_TK = routing.experts_TK.masked_fill(positions_T.unsqueeze(1) < 0, -1)
        slots_TK = choose_slots(experts_TK, table, rank=rank, positions_T=positions_T)
        return Routed(slots_TK, routing.weights_TK, experts_TK, count_experts(experts_TK, config.num_experts))

    def mlp(self, x_TD: Tensor, mlp: Mlp) -> Tensor:
        return mlp(x_TD)

    def experts(self, arrivals: Arrivals, bank: ExpertBank, *, rows_per_slot: float) -> Computed:  # noqa: ARG002
        y_MD = bank.apply(arrivals.x_ND, arrivals.rows_M, arrivals.slots_M)
        return Computed(arrivals.in_pair_order(y_MD), y_MD.shape[0])


class TritonOps:
    """In Triton's kernels; the host waits for nothing. `comm_sms` multiprocessors are left to whoever sends rows.

    With an fp8 bank activations are fp8, too, with a scale for each row and 128 columns.
    """

    def __init__(self, *, comm_sms: int = 0, power_of_two: bool = False) -> None:
        self._comm_sms = comm_sms
        self._power_of_two = power_of_two
        self._router = import_kernels(".router_kernels", __package__)
        self._pairs = import_kernels(".pair_kernels", __package__)
        self._experts = import_kernels(".expert_kernels", __package__)
        self._quant = import_kernels("ep.quant_kernels", None)

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
        num_tokens, device = x_TD.shape[0], x_TD.device
        parts_STE = torch.empty(self._router.PARTS, num_tokens, config.num_experts, device=device)
        self._router.router_logits(x_TD, gate_ED, parts_STE)
        routed = Routed(
            slots_TK=torch.empty(num_tokens, config.top_k, dtype=torch.int64, device=device),
            weights_TK=torch.empty(num_tokens, config.top_k, device=device),
            experts_TK=torch.empty(num_tokens, config.top_k, dtype=torch.int64, device=device),
            counts_E=torch.zeros(config.num_experts, dtype=torch.int64, device=device),
        )
        choose = partial(self._router.choose_experts, rank=rank, positions_T=positions_T)
        choose(parts_STE, bias_E, config, table, **routed._asdict())
        return routed

    def mlp(self, x_TD: Tensor, mlp: Mlp) -> Tensor:
        num_tokens, bank = x_TD.shape[0], mlp.bank
        groups = PairGroups.of_one_slot(num_tokens, device=x_TD.device)
        values_TD, scale_Td = (x_TD, None) if bank.scales is None else self._quantize(x_TD, None)
        return self._compute(values_TD, scale_Td, bank, groups, x_TD.dtype, rows_per_slot=num_tokens)

    def experts(self, arrivals: Arrivals, bank: ExpertBank, *, rows_per_slot: float) -> Computed:
        (num_rows, top_k), device = arrivals.slots_NK.shape, arrivals.slots_NK.device
        groups = PairGroups.empty(num_rows, top_k, bank.num_slots, device=device)
        self._pairs.group_pairs(arrivals.slots_NK, groups)
        if bank.scales is None:
            x_ND, scale_Nd = arrivals.x_ND, None
        else:
            x_ND, scale_Nd = arrivals.fp8 or self._quantize(arrivals.x_ND, groups.places_NK)
        y_MD = self._compute(x_ND, scale_Nd, bank, groups, arrivals.dtype, rows_per_slot=rows_per_slot)
        return Computed(PairRows(y_MD, groups.places_NK), groups.starts_L[-1])

    def _compute(
        self,
        x_ND: Tensor,
        scale_Nd: Tensor | None,
        bank: ExpertBank,
        groups: PairGroups,
        dtype: torch.dtype,
        *,
        rows_per_slot: float,
    ) -> Tensor:
        """[M, D] in `dtype`."""
        _, width, hidden = bank.down_LDF.shape
        act_MF = torch.empty(groups.num_places, hidden, dtype=bank.down_LDF.dtype, device=x_ND.device)
        act_scale_Mf = None if scale_Nd is None else scale_Nd.new_empty(groups.num_places, num_blocks(hidden))
        y_MD = torch.empty(groups.num_places, width, dtype=dtype, device=x_ND.device)
        cut = {"tiling": self._experts.tiling_for(rows_per_slot), "num_programs": self._num_programs(x_ND.device)}
        scales = {"x_scale_Nd": scale_Nd, "act_scale_Mf": act_scale_Mf, "power_of_two": self._power_of_two}
        self._experts.gate_up(x_ND, bank, groups, act_MF, **scales, **cut)
        self._experts.down(act_MF, bank, groups, y_MD, act_scale_Mf=act_scale_Mf, **cut)
        return y_MD

    def _quantize(self, x_ND: Tensor, places_NK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows without a place are left out."""
        num_rows, width = x_ND.shape
        q_ND = torch.empty(num_rows, width, dtype=FP8, device=x_ND.device)
        scale_Nd = torch.empty(num_rows, num_blocks(width), device=x_ND.device)
        self._quant.quantize_rows(x_ND, q_ND, scale_Nd, places_NK=places_NK, power_of_two=self._power_of_two)
        return q_ND, scale_Nd

    def _num_programs(self, device: torch.device) -> int:
        if device.type == "cpu":
            return 1  # the interpreter runs one after the other
        return torch.cuda.get_device_properties(device).multi_processor_count - self._comm_sms


def _numba_ops(*, comm_sms: int) -> MoeOps:
    return import_kernels(".numba_ops", __package__).NumbaOps(comm_sms=comm_sms)


OPS: dict[str, Callable[..., MoeOps]] = {"reference": ReferenceOps, "numba": _numba_ops, "triton": TritonOps}


def moe_ops(name: str, *, comm_sms: int = 0) -> MoeOps:
    """The ops of that name. ValueError if they need a package that is not installed.

    comm_sms   multiprocessors that kernels which stay on theirs to the end leave to exchanges
    """
    return OPS[name](comm_sms=comm_sms)
