"""Capacities of a bounded exchange from a recording of routing: how full the fullest block gets when it is replayed.

    recording --> tokens of every rank, drawn anew --> their slots --> rows by (source, destination) --> plan

Tokens whose experts were recorded are drawn whole; where only counts were, experts are drawn by their counts, which
knows nothing of experts that go together. The same recording gives the same plan on every rank. Knows where experts
sit; what a capacity is, is `ep.capacity`'s.

Legend: T tokens of a rank, K top-k, E experts, Y MoE layers, M recorded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ep import ExchangeConfig, Topology
from ep.capacity import CapacityPlan, measured_plan
from eplb.recording import Recording
from moe import ExpertPlacement, choose_slots

from ..loop.routing_record import read_routing

NUM_EXCHANGES = 128
"""Replayed. The fullest block of so many tells a quantile of 0.99; what is beyond it is run again."""


def read_capacities(
    path: str,
    placements: Mapping[int, ExpertPlacement],
    topology: Topology,
    *,
    tokens: int,
    top_k: int,
    config: ExchangeConfig,
) -> CapacityPlan:
    """The plan for exchanges of `tokens` tokens a rank.

    Raises ValueError for a recording of another model or without tokens, OSError when it cannot be read.
    """
    recording = read_routing(path)
    layers = list(placements.values())
    found = (recording.num_layers, recording.num_experts, recording.top_k)
    wanted = (len(layers), layers[0].num_experts, top_k)
    if found != wanted:
        raise ValueError(
            f"capacities is {path!r}, a recording of {found[0]} layers with {found[1]} experts, top {found[2]}; "
            f"the model has {wanted[0]} with {wanted[1]}, top {wanted[2]}"
        )
    if not recording.num_tokens:
        raise ValueError(f"capacities is {path!r}, a recording of no tokens; record a run that decodes some")
    return measured_plan(
        replay(recording, layers, topology, tokens=tokens),
        topology,
        slots_per_rank=layers[0].slots_per_rank,
        hierarchical=config.hierarchical == "on",
        combine=config.combine,
        quantile=0.99,
    )


def replay(
    recording: Recording, placements: Sequence[ExpertPlacement], topology: Topology, *, tokens: int
) -> list[list[Tensor]]:
    """int64 slots [T, K] of every rank in each of NUM_EXCHANGES exchanges; layers take turns."""
    dice = np.random.default_rng(0)
    tables = [
        [placement.table(rank=rank, node_size=topology.node_size) for rank in range(topology.num_ranks)]
        for placement in placements
    ]
    exchanges: list[list[Tensor]] = []
    for number in range(NUM_EXCHANGES):
        layer = number % len(placements)
        drawn = torch.from_numpy(draw_tokens(recording, layer, tokens * topology.num_ranks, dice))
        positions_T = torch.full((tokens,), number)
        exchanges.append(
            [
                choose_slots(experts_TK, table, rank=rank, positions_T=positions_T)
                for rank, (experts_TK, table) in enumerate(zip(drawn.split(tokens), tables[layer], strict=True))
            ]
        )
    return exchanges


def draw_tokens(recording: Recording, layer: int, num_tokens: int, dice: np.random.Generator) -> np.ndarray:
    """int64 [num_tokens, K] experts of one layer: of recorded tokens, or drawn by the layer's counts.

    By counts: the K largest of log(count) + Gumbel noise, which draws without putting back (Gumbel top-k, Vieira 2014).
    """
    if recording.experts_MYK is not None and len(recording.experts_MYK):
        which = dice.integers(len(recording.experts_MYK), size=num_tokens)
        return recording.experts_MYK[which, layer].astype(np.int64)
    loads_E = recording.loads_YE[layer].astype(np.float64)
    with np.errstate(divide="ignore"):
        keys_E = np.log(loads_E)
    noisy_TE = keys_E + dice.gumbel(size=(num_tokens, len(keys_E)))
    return np.argpartition(-noisy_TE, recording.top_k - 1, axis=1)[:, : recording.top_k].astype(np.int64)
