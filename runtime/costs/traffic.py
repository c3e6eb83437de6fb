"""How many rows of a token leave its rank, by the way the exchange is built; expectations under level routing.

    token's experts   3 | 9 | 10 | 11        ranks of 8 experts: 0 | 1 | 1 | 1
    a row for each expert                4 rows: 1 to rank 0, 3 to rank 1
    a row for each rank                  2 rows: 1 to rank 0, 1 to rank 1

    a row for each node (of two ranks)   1 row over the network, then 1 to each of the node's ranks that need it

Pure arithmetic; knows no bytes and no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

RowsPer = Literal["ranks", "slots", "experts"]
"""ranks: a row for each rank there and back (combine "ranks"). slots: a row for each rank there, for each expert back
(combine "slots"). experts: a row for each expert there and back, as published all-to-all kernels do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The exchange of one group: `ranks` of them, `node_size` on a node, `experts` spread evenly, `top_k` a token."""

    ranks: int
    node_size: int
    experts: int
    top_k: int
    rows_per: RowsPer = "ranks"

    @property
    def near(self) -> int:
        """Other ranks on the same node."""
        return min(self.ranks, self.node_size) - 1

    @property
    def far(self) -> int:
        """Ranks on other nodes."""
        return self.ranks - min(self.ranks, self.node_size)

    @property
    def dispatch_rows(self) -> float:
        """Rows of one token to one given rank, on its way there."""
        return self.rows_by_expert if self.rows_per == "experts" else self._rows_by_rank

    @property
    def combine_rows(self) -> float:
        """Rows of one token from one given rank, on its way back."""
        return self._rows_by_rank if self.rows_per == "ranks" else self.rows_by_expert

    @property
    def rows_by_expert(self) -> float:
        """Experts of a token on one given rank."""
        return self.top_k / self.ranks

    @property
    def nodes(self) -> int:
        """Nodes that the group fills, the last one perhaps in part."""
        return -(-self.ranks // self.node_size)

    @property
    def node_rows(self) -> float:
        """Rows of one token over the network when each other node gets one: (M - 1) x the chance that it needs one."""
        return (self.nodes - 1) * self._reached(self.experts / self.nodes)

    @property
    def _rows_by_rank(self) -> float:
        """The chance that one given rank holds any of a token's experts."""
        return self._reached(self.experts / self.ranks)

    def _reached(self, held: float) -> float:
        """The chance that any of a token's experts is among `held` of them: 1 - C(E - held, k) / C(E, k)."""
        elsewhere = self.experts - held
        return 1.0 - math.prod([max(elsewhere - place, 0.0) / (self.experts - place) for place in range(self.top_k)])


def check_ratios(**ratios: float) -> None:
    """ValueError for a ratio of maximum over mean below 1."""
    for name, value in ratios.items():
        if not 1.0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it is max over mean and at least 1.0, e.g. 1.0")
