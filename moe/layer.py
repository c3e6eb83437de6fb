"""One MoE layer: route, send rows to their experts, compute, bring them back, add the shared expert.

Knows the order of things and its own weights; how rows travel is the exchange's, where experts sit the placement's.
`stages` is a generator: each `yield` hands out what is in flight, and its value is what arrived, so that whoever drives
it may let another micro-batch run in between.

Legend: T tokens here, D model, E experts, K top-k, F expert hidden, N rows received, M (row, slot) pairs received.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep import Exchange, Kind, Pending, Tag, Terms

from .config import MoeConfig
from .experts import ExpertBank, Mlp
from .ops import MoeOps, moe_ops
from .placement import PlacementTable

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeWeights:
    """What one rank holds of one MoE layer."""

    gate_ED: Tensor
    """Router; best kept in the wide dtype, or every step widens it anew."""
    bias_E: Tensor | None
    """Correction bias, only with method noaux_tc."""
    shared: Mlp | None
    bank: ExpertBank


class MoeOutput(NamedTuple):
    """A layer's answer for this rank's tokens."""

    out_TD: Tensor
    """Routed plus shared experts, in x's dtype; the residual is not added. A padded row: the shared expert's alone."""
    counts_E: Tensor
    """int64 pairs that this rank's tokens sent to each expert; the sum is (tokens not padded) x top_k."""
    num_pairs: int | Tensor
    """Pairs that this rank's own experts computed, wherever their tokens came from; on a GPU the host does not know."""
    experts_TK: Tensor
    """int64 experts that each token visits, -1 for a padded row."""


class MoeLayer:
    """One MoE layer on one rank; any number of `stages` of it may be under way, one a track."""

    def __init__(
        self,
        config: MoeConfig,
        weights: MoeWeights,
        *,
        exchange: Exchange,
        table: PlacementTable,
        rank: int,
        ops: MoeOps | None = None,
    ) -> None:
        """ops: None, in torch."""
        gate_shape = tuple(weights.gate_ED.shape)
        assert gate_shape == (config.num_experts, config.hidden_size), f"gate is {gate_shape}"
        assert config.has_bias == (weights.bias_E is not None), f"method {config.method}, bias {weights.bias_E}"
        assert table.num_experts == config.num_experts, f"placement of {table.num_experts}, E {config.num_experts}"
        self._config = config
        self._weights = weights
        self._exchange = exchange
        self._table = table
        self._rank = rank
        self._ops = ops or moe_ops("reference")

    def stages(
        self, x_TD: Tensor, *, step: int, layer: int, track: int, terms: Terms, positions_T: Tensor
    ) -> Generator[Pending[Any], Any, MoeOutput]:
        """Yields what is in flight, returns MoeOutput.

        `terms` hold the largest T of any rank in this step, which fixes the number of rounds, the same on all ranks; T
        may be 0. `positions_T` int64 are the tokens' positions in their requests; a padded row has -1: it is sent
        nowhere and counted nowhere.
        """
        weights, ops = self._weights, self._ops
        routed = ops.route(
            x_TD,
            weights.gate_ED,
            weights.bias_E,
            self._config,
            table=self._table,
            rank=self._rank,
            positions_T=positions_T,
        )
        rows_per_slot = terms.bucket * self._config.top_k / weights.bank.num_slots
        shared_TD = None
        parts: list[Tensor] = []
        num_pairs = 0
        for index, part in enumerate(self._exchange.round_slices(x_TD.shape[0], terms)):
            tag = Tag(step=step, layer=layer, track=track, round=index, kind=Kind.DISPATCH)
            on_the_way = self._exchange.dispatch(
                x_TD[part], routed.slots_TK[part], routed.weights_TK[part], tag=tag, terms=terms
            )
            if index == 0 and weights.shared:  # what needs nobody else runs while the first rows travel
                shared_TD = ops.mlp(x_TD, weights.shared)
            arrivals = yield on_the_way
            computed = ops.experts(arrivals, weights.bank, rows_per_slot=rows_per_slot)
            num_pairs += computed.num_pairs
            back = self._exchange.combine(computed.rows, arrivals, tag=tag._replace(kind=Kind.COMBINE))
            del computed, arrivals  # the largest there is: nobody holds it while others run, nor into the next round
            parts.append((yield back))
        out_TD = parts[0] if len(parts) == 1 else torch.cat(parts)
        if shared_TD is not None:
            out_TD = out_TD + shared_TD
        return MoeOutput(out_TD, routed.counts_E, num_pairs, routed.experts_TK)


def mlp_shapes(hidden_size: int, intermediate_size: int) -> Shapes:
    """Checkpoint names and shapes of a gated MLP."""
    return {
        "gate_proj.weight": (intermediate_size, hidden_size),
        "up_proj.weight": (intermediate_size, hidden_size),
        "down_proj.weight": (hidden_size, intermediate_size),
    }


def router_shapes(config: MoeConfig) -> Shapes:
    """Checkpoint names and shapes of the router, below `mlp.`."""
    shapes: Shapes = {"gate.weight": (config.num_experts, config.hidden_size)}
    if config.has_bias:
        shapes["gate.e_score_correction_bias"] = (config.num_experts,)
    return shapes


def shared_shapes(config: MoeConfig) -> Shapes:
    """Checkpoint names and shapes of the fused shared experts, below `mlp.`; empty without one."""
    if not config.num_shared:
        return {}
    shapes = mlp_shapes(config.hidden_size, config.shared_intermediate_size)
    return {f"shared_experts.{name}": shape for name, shape in shapes.items()}


def expert_shapes(config: MoeConfig) -> Shapes:
    """Checkpoint names and shapes of one routed expert, below `mlp.experts.{j}.`."""
    return mlp_shapes(config.hidden_size, config.intermediate_size)
