"""Parts of a group exchange rows among themselves over one transport, and what leaves is counted by where it goes."""

from __future__ import annotations

import pytest
import torch

from ep import ExchangeBytes, Kind, Tag, Topology, run_ranks
from ep.subgroup import Meter, Subgroup

TAG = Tag(0, 0, 0, 0, Kind.CHECK)


@pytest.mark.parametrize(("size", "node_size"), [(1, 1), (4, 2), (6, 3), (6, 2), (5, 1), (5, 5)])
@pytest.mark.parametrize("members", ["node_members", "rail_members"])
def test_members_hear_each_other_and_nobody_else(size, node_size, members):
    topology = Topology(num_ranks=size, node_size=node_size)

    def fn(transport):
        group = Subgroup(transport, getattr(topology, members)(transport.rank), Meter(topology, transport.rank))
        counts = [1 + (transport.rank + place) % 3 for place in range(group.size)]
        send = torch.full((sum(counts), 2), transport.rank)
        expected = [1 + (rank + group.rank) % 3 for rank in group.members]
        recv = torch.full((sum(expected), 2), -1)
        group.all_to_all(recv, send, recv_splits=expected, send_splits=counts, tag=TAG).wait()
        return recv[:, 0].tolist(), [rank for rank, n in zip(group.members, expected, strict=True) for _ in range(n)]

    assert all(heard == expected for heard, expected in run_ranks(size, fn, timeout_s=10))


def test_bytes_are_counted_by_network_and_node_and_what_stays_is_not():
    """Rank 1 of 3 nodes of 2 sends 1, 2, 4, 8, 16, 32 rows of 6 bytes to ranks 0 to 5."""
    topology = Topology(num_ranks=6, node_size=2)

    def fn(transport):
        meter = Meter(topology, transport.rank)
        group = Subgroup(transport, range(6), meter)
        counts = [2**rank if transport.rank == 1 else 0 for rank in range(6)]
        recv = torch.empty(2**transport.rank, 3, dtype=torch.int16)
        send = torch.zeros(sum(counts), 3, dtype=torch.int16)
        expected = [2**transport.rank if rank == 1 else 0 for rank in range(6)]
        group.all_to_all(recv, send, recv_splits=expected, send_splits=counts, tag=TAG).wait()
        return meter.take(), meter.take()

    taken = run_ranks(6, fn, timeout_s=10)
    nothing = ExchangeBytes(network=0, node=0)
    assert taken[1] == (ExchangeBytes(network=6 * (4 + 8 + 16 + 32), node=6 * 1), nothing)
    assert taken[0] == taken[5] == (nothing, nothing)
