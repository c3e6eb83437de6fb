"""Where the tokens of a whole group go, when only one of its ranks is there: drawn, or as they were recorded.

    Trace        how often each expert is asked for, and by which tokens         uniform, power-law, or a recording
    placements   where experts sit: in order ("placed"), or planned for these very loads ("balanced")
    exchanges    every rank's slots in one exchange of each layer

Pure; knows no device and no time.

Legend: Y layers of the trace, T tokens of a rank, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ep import Topology
from eplb import PlanConfig, Recording, plan
from moe import ExpertPlacement, MoeConfig, spread
from moe.placement import choose_slots

from ..loop.routing_record import read_routing
from ..settings.capacities import draw_tokens

Shape = Literal["uniform", "power-law"]
Placing = Literal["balanced", "placed"]
MOST_LAYERS = 8
"""Exchanges that differ: further layers begin again with the first."""
PLANNED_TOKENS = 1 << 14
"""Tokens that loads are counted from where they are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Tokens of a model's MoE layers.

    weights_YE   what experts are drawn by; None: tokens are taken from `recording`
    """

    moe: MoeConfig
    weights_YE: np.ndarray | None = None
    recording: Recording | None = None

    @classmethod
    def drawn(cls, moe: MoeConfig, *, shape: Shape, skew: float, num_layers: int, seed: int) -> Trace:
        """Experts as popular as a power of their place, in an order of each layer's own; skew 0 is uniform."""
        dice = np.random.default_rng(seed)
        popular_E = np.arange(1, moe.num_experts + 1, dtype=np.float64) ** -(skew if shape == "power-law" else 0.0)
        return cls(moe=moe, weights_YE=np.stack([dice.permutation(popular_E) for _ in range(num_layers)]))

    @classmethod
    def recorded(cls, moe: MoeConfig, path: str) -> Trace:
        """Of a run with --record-routing. ValueError for a recording of another model."""
        recording = read_routing(path)
        if (recording.num_experts, recording.top_k) != (moe.num_experts, moe.top_k):
            raise ValueError(
                f"routing is {path!r}, a recording of {recording.num_experts} experts and top_k {recording.top_k}; the "
                f"model has {moe.num_experts} and {moe.top_k}, so give one of that model, or uniform"
            )
        return cls(moe=moe, recording=recording)

    @property
    def num_layers(self) -> int:
        """Layers that differ."""
        if self.weights_YE is not None:
            return len(self.weights_YE)
        assert self.recording is not None
        return min(self.recording.num_layers, MOST_LAYERS)

    def tokens(self, layer: int, num_tokens: int, dice: np.random.Generator) -> np.ndarray:
        """int64 [num_tokens, K] experts."""
        if self.recording is not None:
            return draw_tokens(self.recording, layer, num_tokens, dice)
        assert self.weights_YE is not None
        return draw_limited(self.weights_YE[layer], num_tokens, self.moe, dice)

    def loads_YE(self) -> np.ndarray:
        """Pairs of each expert, of many tokens."""
        if self.recording is not None:
            return self.recording.loads_YE[: self.num_layers]
        dice = np.random.default_rng(1)
        return np.stack(
            [
                np.bincount(self.tokens(layer, PLANNED_TOKENS, dice).ravel(), minlength=self.moe.num_experts)
                for layer in range(self.num_layers)
            ]
        )


def draw_limited(weights_E: np.ndarray, num_tokens: int, moe: MoeConfig, dice: np.random.Generator) -> np.ndarray:
    """int64 [num_tokens, K]: without putting back, from the groups that a token is limited to.

    Log-weights with Gumbel noise stand where a router's scores do: groups are ranked by their best two, and the best K
    of the groups that are kept are taken (Gumbel top-k, Vieira 2014).
    """
    scores_TE = np.log(weights_E) + dice.gumbel(size=(num_tokens, moe.num_experts))
    if moe.is_group_limited:
        grouped_TQG = scores_TE.reshape(num_tokens, moe.num_groups, -1)
        best_TQ = np.sort(grouped_TQG, axis=2)[:, :, -2:].sum(axis=2)
        kept_TQ = np.argpartition(-best_TQ, moe.topk_groups - 1, axis=1)[:, : moe.topk_groups]
        limited_TQG = np.full_like(grouped_TQG, -np.inf)
        np.put_along_axis(limited_TQG, kept_TQ[:, :, None], np.take_along_axis(grouped_TQG, kept_TQ[:, :, None], 1), 1)
        scores_TE = limited_TQG.reshape(num_tokens, -1)
    return np.argpartition(-scores_TE, moe.top_k - 1, axis=1)[:, : moe.top_k].astype(np.int64)


def placements(
    trace: Trace, topology: Topology, *, placing: Placing, redundant: int, tokens: int
) -> list[ExpertPlacement]:
    """Where experts sit in each layer of the trace."""
    moe = trace.moe
    start = spread(moe.num_experts, topology.num_ranks, redundant)
    if placing == "placed":
        return [start] * trace.num_layers
    config = PlanConfig(
        num_redundant=redundant,
        top_k=moe.top_k,
        node_size=topology.node_size,
        groups=moe.num_groups,
        tokens_per_rank=float(tokens),
    )
    return list(plan(trace.loads_YE(), old=[start] * trace.num_layers, config=config).placements)


def exchanges(
    trace: Trace, places: Sequence[ExpertPlacement], topology: Topology, *, tokens: int, seed: int
) -> list[list[Tensor]]:
    """int64 slots [T, K] of every rank, of one exchange a layer."""
    dice = np.random.default_rng(seed)
    found: list[list[Tensor]] = []
    for layer, placement in enumerate(places):
        experts_NK = torch.from_numpy(trace.tokens(layer, tokens * topology.num_ranks, dice))
        found.append(
            [
                choose_slots(
                    experts_TK,
                    placement.table(rank=rank, node_size=topology.node_size),
                    rank=rank,
                    positions_T=torch.full((len(experts_TK),), layer),
                )
                for rank, experts_TK in enumerate(experts_NK.split(tokens))
            ]
        )
    return found


def received_pairs(found: Sequence[Sequence[Tensor]], *, slots_per_rank: int) -> np.ndarray:
    """[layers, R] pairs that each rank's experts compute."""
    return np.stack(
        [
            np.bincount((torch.cat(list(ranks)).flatten() // slots_per_rank).numpy(), minlength=len(ranks))
            for ranks in found
        ]
    )
