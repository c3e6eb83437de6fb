"""Times of operations from measured tables: what published kernels take, put to the exchange as it is built here.

Knows the tables of one model on one device (`cost_tables`); another model needs its own, or the peaks (`roofline`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost_tables import CostTables, ExchangeTable
from .costs import StepFrame
from .traffic import RowsPer, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperations:
    """`Operations` of a group of `ranks`, each with an even share of experts and of `redundant` copies.

    imbalance   rows that the fullest rank receives over the mean; 1.0 = level
    rows_per    how the exchange is built; the tables hold times of a row for each expert
    hierarchical   one row a token and node over the network, and from there on inside the node (never measured)
    """

    tables: CostTables
    ranks: int
    redundant: int = 0
    imbalance: float = 1.0
    rows_per: RowsPer = "ranks"
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; it must be at least 1, e.g. {self.tables.node_size}")
        if self.imbalance < 1.0:
            raise ValueError(f"imbalance is {self.imbalance}; it is max over mean and at least 1.0, e.g. 1.0")

    @property
    def frame(self) -> StepFrame:
        """See `Operations`."""
        tables = self.tables
        return StepFrame(tables.moe_layers, tables.dense_layers, tables.head_us, tables.host_us)

    @property
    def local_experts(self) -> int:
        """Experts and copies that the fullest rank holds."""
        return -(-(self.tables.experts + self.redundant) // self.ranks)

    def attention_us(self, tokens: float, context_len: float) -> float:
        """See `Operations`."""
        return self.tables.projections_us.at(tokens) + self.tables.core_us.at(tokens, context_len)

    def experts_us(self, tokens: float, *, mean_tokens: float) -> float:
        """See `Operations`."""
        routed = self.tables.routed_us.at(self.local_experts, self.imbalance * mean_tokens)
        return self.tables.shared_us.at(tokens) + routed + self.tables.glue_us

    def exchange_us(self, tokens: float) -> float:
        """See `Operations`. Fewer rows a token cost what as many rows of fewer tokens do."""
        if self.ranks == 1:
            return 0.0
        traffic = Traffic(
            ranks=self.ranks,
            node_size=self.tables.node_size,
            experts=self.tables.experts,
            top_k=self.tables.top_k,
            rows_per=self.rows_per,
        )
        there = tokens * traffic.dispatch_rows / traffic.rows_by_expert
        back = tokens * traffic.combine_rows / traffic.rows_by_expert
        if self.ranks <= self.tables.node_size:
            return self._in_node_us(there, back)
        kept = traffic.node_rows / (traffic.far * traffic.dispatch_rows) if self.hierarchical else 1.0
        return self._between_sizes_us(there, back, kept=kept)

    def dense_us(self, tokens: float) -> float:
        """See `Operations`."""
        return self.tables.dense_us.at(tokens) + self.tables.glue_us

    def prefill_us(self, position: float) -> float:
        """See `Operations`."""
        return self.tables.prefill_us.at(position)

    def _in_node_us(self, there: float, back: float) -> float:
        """Fewer ranks on the node: fewer of the rows leave."""
        full = self.tables.exchange[0]
        leaving = ((self.ranks - 1) / self.ranks) / ((full.ranks - 1) / full.ranks)
        return _exchange_us(full, there * leaving, back * leaving)

    def _between_sizes_us(self, there: float, back: float, *, kept: float) -> float:
        """On a line over the share of rows that leave the node: that share is what the time goes by.

        Of those, `kept` are left when each node gets one row; all others travel inside nodes, as in a group of one.
        """
        if kept < 1.0:
            flat_us = self._between_sizes_us(there, back, kept=1.0)
            in_node_us = _exchange_us(self.tables.exchange[0], there, back)
            return in_node_us + kept * (flat_us - in_node_us)
        sizes = self.tables.exchange
        above = next((i for i, table in enumerate(sizes) if table.ranks >= self.ranks), len(sizes) - 1)
        left, right = sizes[above - 1], sizes[above]
        low, high, here = [1.0 - self.tables.node_size / ranks for ranks in (left.ranks, right.ranks, self.ranks)]
        left_us, right_us = _exchange_us(left, there, back), _exchange_us(right, there, back)
        return left_us + (right_us - left_us) * (here - low) / (high - low)


def _exchange_us(table: ExchangeTable, there: float, back: float) -> float:
    return table.dispatch_us.at(there) + table.combine_us.at(back)
