"""What a placement policy is asked: how many ranks, slots and copies there are, and what noise the loads will have.

Loads come beside it. Plain numbers; knows no policy.

Legend: Y the MoE layers of a model, E experts, S slots of all ranks, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The same for all layers.

    num_copies       experts and their redundant copies; the slots beyond stay empty
    node_size        ranks on a node
    groups           groups of experts by which routing is limited; 1: none
    top_k            experts a token visits
    tokens_per_rank  tokens that a rank brings to a step; 0: plan for averages, without the noise of single steps
    """

    num_experts: int
    num_ranks: int
    slots_per_rank: int
    num_copies: int
    node_size: int
    groups: int = 1
    top_k: int = 1
    tokens_per_rank: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Nodes that groups of experts can be dealt to; 1 where the numbers do not allow it, or nothing is gained."""
        nodes, rest = divmod(self.num_ranks, self.node_size)
        return nodes if not rest and self.groups > 1 and self.groups % nodes == 0 else 1


Policy = Callable[[np.ndarray, Problem, np.ndarray | None], np.ndarray]
"""(loads float64 [Y, E], problem, slots in force int64 [Y, S] or None) -> int64 [Y, S] expert in each slot, rank-major;
-1 is an empty slot."""
