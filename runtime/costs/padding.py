"""What empty places in the blocks of a bounded exchange cost: places over the rows that are expected in them.

The places are those that the exchange itself would have (`ep.blueprint`); on one node a block holds the whole batch.
"""

from __future__ import annotations

from ep import Topology
from ep.blueprint import Blueprint

from .traffic import Traffic


def padding_of(blueprint: Blueprint, *, tokens: int) -> float:
    """Places over expected rows in the hop that leaves a rank, on its way there, for `tokens` a rank; at least 1.

    1.0 where blocks have no fixed size, or nothing travels.
    """
    topology, places = blueprint.topology, blueprint.places
    if not places or tokens <= 0 or topology.num_ranks == 1:
        return 1.0
    members = places[0].shape.num_members
    rows = tokens * _rows(topology, members, blueprint)
    return max(places[0].dispatch(tokens, 0) / rows, 1.0)


def _rows(topology: Topology, members: int, blueprint: Blueprint) -> float:
    """Rows of one token to one member of the hop: a rank, or a node."""
    traffic = Traffic(
        ranks=members,
        node_size=topology.node_size,
        experts=blueprint.num_slots,
        top_k=blueprint.top_k,
    )
    return traffic.dispatch_rows
