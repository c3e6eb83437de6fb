"""Which rank sits on which node. Ranks of a node follow each other; every node has as many.

8 ranks, node_size 2      node 0: 0 1    node 1: 2 3    node 2: 4 5    node 3: 6 7
                          rail 0: 0 2 4 6               rail 1: 1 3 5 7
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of one group of ranks. A rail is the ranks of equal place in their nodes."""

    num_ranks: int
    node_size: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks = {self.num_ranks}: must be at least 1, for example 1")
        if self.node_size < 1 or self.num_ranks % self.node_size:
            legal = max(size for size in range(1, self.num_ranks + 1) if self._fits(size))
            raise ValueError(
                f"node_size = {self.node_size}: must divide the number of ranks, {self.num_ranks}; for example {legal}"
            )

    def _fits(self, size: int) -> bool:
        return self.num_ranks % size == 0 and size <= max(self.node_size, 1)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.node_size

    def node_of(self, rank: int) -> int:
        return rank // self.node_size

    def local_of(self, rank: int) -> int:
        """The rank's place in its node."""
        return rank % self.node_size

    def node_members(self, rank: int) -> range:
        """The ranks of this rank's node."""
        first = rank - self.local_of(rank)
        return range(first, first + self.node_size)

    def rail_members(self, rank: int) -> range:
        """The ranks of this rank's rail, one a node."""
        return range(self.local_of(rank), self.num_ranks, self.node_size)
