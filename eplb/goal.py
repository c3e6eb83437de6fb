"""What one rebalance is to reach and how far it has come; what the planner is asked, and what is counted for the user.

Values only: who changes them, and when, is `rebalancer`'s.

Legend: Y the MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moe import ExpertPlacement

from .load import LoadWindow
from .planner import RebalancePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the planner is asked, a few layers at a time; the same on every rank.

    layers           which MoE layers
    counts_YE        int64, their weighted counts over all ranks (see `load`)
    old              where their experts sit
    node_size        ranks on a node
    tokens_per_rank  that an average rank brings to a step
    """

    layers: slice
    counts_YE: Tensor
    old: Sequence[ExpertPlacement]
    node_size: int
    tokens_per_rank: float


Planner = Callable[[Question], RebalancePlan]
"""Pure, so that every rank gets the same answer. A layer that is to stay as it is keeps its placement."""


@dataclass(slots=True, kw_only=True)
class Goal:
    """A plan that is being made, then moved to, layer by layer."""

    window: LoadWindow
    tokens_per_rank: float
    new: list[ExpertPlacement] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    """Layers that have not switched yet; the first is under way."""
    turns: int = 0
    switched: int = 0
    experts: int = 0
    num_bytes: int = 0

    @property
    def gain(self) -> float:
        """Share of the slowest ranks' rows that go away, over all layers: their means are alike."""
        return 1.0 - sum(1.0 / each for each in self.after) / sum(1.0 / each for each in self.before)
