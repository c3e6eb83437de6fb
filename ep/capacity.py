"""Places in the blocks of a bounded exchange, the same for all pairs of ranks; pure, from measured or expected rows.

    hop       there                              back, ranks    back, slots
    flat      rows of a token to one rank        as many        pairs of a token on one rank
    nodes     rows of a token to one node        as many        pairs of a token on one node
    inside    rows of M sources to one rank      as many        their pairs on one rank

Each `level` adds a quarter. Nothing needs more places than there can be rows. Inside one node a block has room for the
whole bucket, and nothing can be left behind on the way there.

Legend: T tokens, K top-k, R ranks, H members of a hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import CombineMode
from .fullest import BinomialRows, FixedRows, Fullest, WholeRows, chance_of_part, measure
from .layout import ranks_of
from .terms import MOST_LEVEL
from .topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class HopShape:
    """Who exchanges rows in one hop. `sources`: ranks whose tokens one member may have to send."""

    num_members: int
    slots_per_member: int
    sources: int = 1


def hop_shapes(topology: Topology, *, slots_per_rank: int, hierarchical: bool) -> tuple[HopShape, ...]:
    """One hop among all ranks, or one over nodes and one inside the node."""
    if not hierarchical:
        return (HopShape(num_members=topology.num_ranks, slots_per_member=slots_per_rank),)
    num_nodes, node_size = topology.num_nodes, topology.node_size
    return (
        HopShape(num_members=num_nodes, slots_per_member=node_size * slots_per_rank),
        HopShape(num_members=node_size, slots_per_member=slots_per_rank, sources=num_nodes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HopRows:
    """One hop's rows there, and back: None, one row back for each row there."""

    dispatch: Fullest
    combine: Fullest | None = None

    @property
    def may_overflow(self) -> bool:
        return not all(isinstance(rows, WholeRows) for rows in (self.dispatch, self.combine or WholeRows()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The rows of every hop of an exchange, one or two."""

    hops: tuple[HopRows, ...]

    @classmethod
    def fixed(cls, number: int, *, num_hops: int = 1, combine: int | None = None) -> CapacityPlan:
        """`number` places in every block, `combine` on the way back (None: as many as there)."""
        back = None if combine is None else FixedRows(number=combine)
        return cls(hops=(HopRows(dispatch=FixedRows(number=number), combine=back),) * num_hops)

    @property
    def may_overflow(self) -> bool:
        return any(hop.may_overflow for hop in self.hops)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopPlaces:
    """The capacities of one hop, by bucket and level; `bounded.Capacities`."""

    rows: HopRows
    shape: HopShape
    top_k: int
    before: HopPlaces | None = None
    """The hop before: all places that landed with it is what this one may have to send."""

    def dispatch(self, bucket: int, level: int) -> int:
        """Rows in a block on its way there."""
        limit = bucket if self.before is None else self.before.landing(bucket, level)
        return _raised(self.rows.dispatch.places(bucket), level, limit)

    def combine(self, bucket: int, level: int) -> int:
        """Rows in a block on its way back."""
        there = self.dispatch(bucket, level)
        if self.rows.combine is None:
            return there
        return _raised(self.rows.combine.places(bucket), level, there * self.top_k)

    def landing(self, bucket: int, level: int) -> int:
        """Rows that may land here."""
        return self.shape.num_members * self.dispatch(bucket, level)

    def risk(self, bucket: int, level: int) -> float:
        """Chance that something does not fit in one exchange; nan where nothing is known of it."""
        there = self.rows.dispatch.risk(bucket, self.dispatch(bucket, level))
        back = 0.0 if self.rows.combine is None else self.rows.combine.risk(bucket, self.combine(bucket, level))
        return 1.0 - (1.0 - there) * (1.0 - back)


def _raised(places: int, level: int, limit: int) -> int:
    """A quarter more with each level; at least one place, at most as many as there can be rows."""
    return max(1, min(-(-places * (4 + min(level, MOST_LEVEL)) // 4), limit))


def places_of(plan: CapacityPlan, shapes: Sequence[HopShape], *, top_k: int) -> list[HopPlaces]:
    """The plan's capacities for hops of these shapes."""
    assert len(plan.hops) == len(shapes), f"a plan of {len(plan.hops)} hops for {len(shapes)}"
    places: list[HopPlaces] = []
    for rows, shape in zip(plan.hops, shapes, strict=True):
        places.append(HopPlaces(rows=rows, shape=shape, top_k=top_k, before=places[-1] if places else None))
    return places


def uniform_plan(shapes: Sequence[HopShape], topology: Topology, *, top_k: int, combine: CombineMode) -> CapacityPlan:
    """What level routing needs, when nothing was measured."""
    slots_per_rank = shapes[-1].slots_per_member
    num_slots = topology.num_ranks * slots_per_rank
    hops: list[HopRows] = []
    for shape in shapes:
        parts, num_pairs = num_slots // shape.slots_per_member, topology.num_ranks * shape.num_members
        there: Fullest = BinomialRows(
            per_token=shape.sources, chance=chance_of_part(num_slots, parts, top_k), num_pairs=num_pairs
        )
        if topology.num_nodes == 1:
            there = WholeRows()
        back = BinomialRows(per_token=shape.sources * top_k, chance=1 / parts, num_pairs=num_pairs)
        hops.append(HopRows(dispatch=there, combine=back if combine == "slots" else None))
    return CapacityPlan(hops=tuple(hops))


def measured_plan(
    exchanges: Sequence[Sequence[Tensor]],
    topology: Topology,
    *,
    slots_per_rank: int,
    hierarchical: bool,
    combine: CombineMode,
    quantile: float = 0.999,
) -> CapacityPlan:
    """From routing that was recorded: of each exchange every rank's int64 slots [T, K] (-1 none). In `quantile` of them
    everything would have fitted."""
    if not exchanges:
        raise ValueError("exchanges is empty: capacities are measured from at least one recorded exchange")
    tokens = max(slots_TK.shape[0] for ranks in exchanges for slots_TK in ranks)
    counted = [
        count_hops(ranks, topology, slots_per_rank=slots_per_rank, hierarchical=hierarchical) for ranks in exchanges
    ]
    hops: list[HopRows] = []
    for hop in range(len(counted[0])):
        there = measure([each[hop][0] for each in counted], tokens=max(tokens, 1), quantile=quantile)
        back = measure([each[hop][1] for each in counted], tokens=max(tokens, 1), quantile=quantile)
        hops.append(HopRows(dispatch=there, combine=back if combine == "slots" else None))
    return CapacityPlan(hops=tuple(hops))


def count_hops(
    slots_by_rank: Sequence[Tensor], topology: Topology, *, slots_per_rank: int, hierarchical: bool
) -> list[tuple[list[int], list[int]]]:
    """Of each hop (rows, pairs) of all (source, destination) pairs of one exchange."""
    rows_RH, pairs_RH = _count(slots_by_rank, slots_per_rank, topology.num_ranks)
    if not hierarchical:
        return [(rows_RH.flatten().tolist(), pairs_RH.flatten().tolist())]
    over = _count(slots_by_rank, slots_per_rank * topology.node_size, topology.num_nodes)
    # [R, R] -> [source node, source place, node, place]; tokens of all source nodes meet at the gateway of their place
    apart = (topology.num_nodes, topology.node_size, topology.num_nodes, topology.node_size)
    inside = [counts.view(apart).sum(0) for counts in (rows_RH, pairs_RH)]
    return [
        (over[0].flatten().tolist(), over[1].flatten().tolist()),
        (inside[0].flatten().tolist(), inside[1].flatten().tolist()),
    ]


def _count(slots_by_rank: Sequence[Tensor], slots_per_member: int, num_members: int) -> tuple[Tensor, Tensor]:
    """(rows, pairs) from each rank to each member, [R, members]."""
    pairs_RH = torch.zeros(len(slots_by_rank), num_members, dtype=torch.int64)
    rows_RH = torch.zeros_like(pairs_RH)
    for rank, slots_TK in enumerate(slots_by_rank):
        members_TK = ranks_of(slots_TK, slots_per_member) + 1
        counts_TH = torch.zeros(slots_TK.shape[0], num_members + 1, dtype=torch.int64)
        counts_TH.scatter_add_(1, members_TK, torch.ones_like(members_TK))
        pairs_RH[rank] = counts_TH[:, 1:].sum(0)
        rows_RH[rank] = (counts_TH[:, 1:] > 0).sum(0)
    return rows_RH, pairs_RH


def describe(
    places: Sequence[HopPlaces], *, bucket: int, level: int, exchanges: int, row_bytes: tuple[int, int]
) -> list[str]:
    """Lines for people: what a step of so many `exchanges` (layers) sends in blocks, and how often it has to be run
    again. row_bytes: of a row there and of one back."""
    there_bytes, back_bytes = row_bytes
    names = ("all ranks",) if len(places) == 1 else ("over nodes", "inside a node")
    lines: list[str] = []
    for name, hop in zip(names, places, strict=True):
        there, back = hop.dispatch(bucket, level), hop.combine(bucket, level)
        sent = hop.shape.num_members * ((there + 1) * there_bytes + (back + 1) * back_bytes)
        lines.append(
            f"{name}: {there} rows to each of {hop.shape.num_members} at {bucket} tokens, {back} back, "
            f"{sent / 2**20:.2f} MiB a rank and layer"
        )
    stays = 1.0
    for hop in places:
        stays *= 1.0 - hop.risk(bucket, level)
    lines.append(f"steps that do not fit: {1.0 - stays**exchanges:.2g} of all, expected over {exchanges} layers")
    return lines
