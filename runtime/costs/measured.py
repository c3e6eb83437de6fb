"""Times of operations from measured tables: what published kernels take, put to the exchange as it is built here.

Knows the tables of one model on one device (`cost_tables`); another model needs its own, or the peaks (`roofline`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost_tables import CostTables, ExchangeTable
from .costs import StepFrame
from .traffic import RowsPer, Traffic, check_ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperations:
    """`Operations` of a group of `ranks`, each with an even share of experts and of `redundant` copies.

    imbalance      rows that the fullest rank receives over the mean, as its experts compute them; 1.0 = level
    wire_imbalance   the same as its links carry them: what one rank is sent takes its own link as long
    padding        places in the blocks of a bounded exchange over the rows in them (`padding`); empty places travel too
    rows_per       how the exchange is built; the tables hold times of a row for each expert
    hierarchical   one row a token and node over the network, and from there on inside the node (never measured)
    node_size      ranks of a node; None: as measured. The share of rows that leave the node is what the time goes by
    host_us        of the host, once a step; None: as in the tables
    """

    tables: CostTables
    ranks: int
    redundant: int = 0
    imbalance: float = 1.0
    rows_per: RowsPer = "ranks"
    hierarchical: bool = False
    wire_imbalance: float = 1.0
    padding: float = 1.0
    node_size: int | None = None
    host_us: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; it must be at least 1, e.g. {self.tables.node_size}")
        if self.node_size is not None and self.node_size < 1:
            raise ValueError(f"node_size is {self.node_size}; it must be at least 1, e.g. {self.tables.node_size}")
        check_ratios(imbalance=self.imbalance, wire_imbalance=self.wire_imbalance, padding=self.padding)

    @property
    def frame(self) -> StepFrame:
        """See `Operations`."""
        tables = self.tables
        host_us = tables.host_us if self.host_us is None else self.host_us
        return StepFrame(tables.moe_layers, tables.dense_layers, tables.head_us, host_us)

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
            node_size=self._node_size,
            experts=self.tables.experts,
            top_k=self.tables.top_k,
            rows_per=self.rows_per,
        )
        sent = tokens * max(self.wire_imbalance, self.padding)
        there = sent * traffic.dispatch_rows / traffic.rows_by_expert
        back = sent * traffic.combine_rows / traffic.rows_by_expert
        if self.ranks <= self._node_size:
            return self._in_node_us(there, back)
        kept = traffic.node_rows / (traffic.far * traffic.dispatch_rows) if self.hierarchical else 1.0
        return self._between_sizes_us(there, back, kept=kept)

    def dense_us(self, tokens: float) -> float:
        """See `Operations`."""
        return self.tables.dense_us.at(tokens) + self.tables.glue_us

    def prefill_us(self, position: float) -> float:
        """See `Operations`."""
        return self.tables.prefill_us.at(position)

    @property
    def _node_size(self) -> int:
        return self.tables.node_size if self.node_size is None else self.node_size

    def _in_node_us(self, there: float, back: float) -> float:
        """Fewer ranks on the node: fewer of the rows leave."""
        full = self.tables.exchange[0]
        leaving = ((self.ranks - 1) / self.ranks) / ((full.ranks - 1) / full.ranks)
        return _exchange_us(full, there * leaving, back * leaving)

    def _between_sizes_us(self, there: float, back: float, *, kept: float) -> float:
        """On a line over the share of rows that leave the node; beyond the largest group that was measured, too.

        Of those, `kept` are left when each node gets one row; all others travel inside nodes, as in a group of one.
        """
        if kept < 1.0:
            flat_us = self._between_sizes_us(there, back, kept=1.0)
            in_node_us = _exchange_us(self.tables.exchange[0], there, back)
            return in_node_us + kept * (flat_us - in_node_us)
        sizes = self.tables.exchange
        shares = [1.0 - self.tables.node_size / table.ranks for table in sizes]
        here = 1.0 - self._node_size / self.ranks
        above = next((place for place, share in enumerate(shares) if place and share >= here), len(sizes) - 1)
        left, right, low, high = sizes[above - 1], sizes[above], shares[above - 1], shares[above]
        left_us, right_us = _exchange_us(left, there, back), _exchange_us(right, there, back)
        return left_us + (right_us - left_us) * (here - low) / (high - low)


def _exchange_us(table: ExchangeTable, there: float, back: float) -> float:
    return table.dispatch_us.at(there) + table.combine_us.at(back)
