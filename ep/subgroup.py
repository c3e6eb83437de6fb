"""A part of a group that exchanges rows among itself, and what that puts on the wire.

One transport serves all: two communicators that are busy at once can wait for each other. All ranks make the call
together, each for the part that it belongs to; to everybody else it sends nothing.

    rank 1 of 4, members 1 and 3     its splits [5, 2]     the transport's [0, 5, 0, 2]

Knows rows and bytes, not what they are.

Legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .topology import Topology
from .transport import Pending, Tag, Transport


class ExchangeBytes(NamedTuple):
    """What one rank sent, as put on the wire: headers and padding are in it, rows to itself are not."""

    network: int
    """To ranks of other nodes."""
    node: int
    """To other ranks of its own node."""


class Meter:
    """Counts what one rank sends."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self._topology = topology
        self._rank = rank
        self._network = 0
        self._node = 0

    def count(self, rank: int, num_bytes: int) -> None:
        """`num_bytes` leave for `rank`."""
        if self._topology.node_of(rank) != self._topology.node_of(self._rank):
            self._network += num_bytes
        elif rank != self._rank:
            self._node += num_bytes

    def take(self) -> ExchangeBytes:
        """What was sent since the last call."""
        taken = ExchangeBytes(network=self._network, node=self._node)
        self._network = self._node = 0
        return taken


class Subgroup:
    """This rank's end of the part of a group that it belongs to. Ranks outside of it have parts of their own."""

    def __init__(self, transport: Transport, members: Sequence[int], meter: Meter) -> None:
        assert transport.rank in members, (transport.rank, members)
        assert list(members) == sorted(set(members)), members
        self.members = tuple(members)
        self.rank = self.members.index(transport.rank)
        self.size = len(self.members)
        self._transport = transport
        self._meter = meter

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `transport.Transport`; splits hold one number a member, in the order of their ranks."""
        width = send.dtype.itemsize * send.shape[1:].numel()
        for rank, count in zip(self.members, send_splits, strict=True):
            self._meter.count(rank, count * width)
        return self._transport.all_to_all(
            recv, send, recv_splits=self._spread(recv_splits), send_splits=self._spread(send_splits), tag=tag
        )

    def _spread(self, splits: Sequence[int]) -> Sequence[int]:
        if self.size == self._transport.size:
            return splits
        whole = [0] * self._transport.size
        for rank, count in zip(self.members, splits, strict=True):
            whole[rank] = count
        return whole
