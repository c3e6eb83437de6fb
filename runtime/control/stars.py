"""Wires the control plane: who calls whom, and how many levels there are. Used once, when the group starts.

Only the hub's address has to be known beforehand. Up to `group_size` ranks all call the hub. Past that the hub keeps a
directory while the group starts: leaders leave the address where they listen, and each rank learns where it belongs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from ep.errors import PeerFailed

from .control import WORD, Branch, SocketControl
from .door import Door, open_listener
from .frames import Link
from .handshake import Address, LinkKind, Terms, connect

ENTRY_BYTES = 64
"""An address in the directory: host:port, filled up with zero bytes."""


def open_control(
    *,
    rank: int,
    size: int,
    hub: socket.socket | Address,
    key: bytes,
    width: int,
    interface: str = "lo",
    group_size: int = 64,
    timeout_s: float = 60.0,
) -> SocketControl:
    """This rank's end of the control plane for rows of `width` integers; waits until all links it needs stand.

    hub         the address of rank 0; on rank 0 the socket that listens there, which is used up
    interface   where leaders listen
    timeout_s   how long ranks may take to come

    Raises PeerFailed naming a rank that did not come, WrongKey or WrongPeer where it is this one that does not belong.
    """
    wiring = _Wiring(
        rank=rank, size=size, key=key, width=width, interface=interface, group_size=group_size, timeout_s=timeout_s
    )
    if isinstance(hub, socket.socket) and rank != 0:
        raise ValueError(f"hub of rank {rank} is a socket; only rank 0 listens, others need its address")
    if size <= group_size:
        return wiring.leaf(hub) if not isinstance(hub, socket.socket) else wiring.only_hub(hub)
    if isinstance(hub, socket.socket):
        return wiring.hub_of_leaders(hub)
    return wiring.leader(hub) if rank % group_size == 0 else wiring.leaf(wiring.look_up(hub, None))


class _Wiring:
    """What all ways to wire a rank share."""

    def __init__(
        self, *, rank: int, size: int, key: bytes, width: int, interface: str, group_size: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self.key = key
        self.width = width
        self.interface = interface
        self.timeout_s = timeout_s
        self.group_size = group_size

    def leaf(self, above: Address) -> SocketControl:
        link = self._call(above, self._terms(LinkKind.VOTE, up_rows=1))
        return SocketControl(rank=self.rank, size=self.size, width=self.width, up=link, branches=())

    def only_hub(self, listener: socket.socket) -> SocketControl:
        links = self._accept(listener, self._terms(LinkKind.VOTE, up_rows=1), set(range(1, self.size)))
        return self._control(None, members=links, leaders={})

    def leader(self, hub: Address) -> SocketControl:
        listener = open_listener(self.interface)
        above = self.look_up(hub, listener)
        up = self._call(above, self._terms(LinkKind.LEADER, up_rows=self.group_size))
        members = self._accept(listener, self._terms(LinkKind.VOTE, up_rows=1), self._members())
        return self._control(up, members=members, leaders={})

    def hub_of_leaders(self, listener: socket.socket) -> SocketControl:
        for_leaders, for_members = open_listener(self.interface), open_listener(self.interface)
        self._keep_directory(listener, for_leaders=for_leaders, for_members=for_members)
        leaders = set(range(self.group_size, self.size, self.group_size))
        above = self._accept(for_leaders, self._terms(LinkKind.LEADER, up_rows=self.group_size), leaders)
        members = self._accept(for_members, self._terms(LinkKind.VOTE, up_rows=1), self._members())
        return self._control(None, members=members, leaders=above)

    def look_up(self, hub: Address, listener: socket.socket | None) -> Address:
        """Where this rank's link up goes; `listener`: where it will be called itself."""
        directory = self._call(hub, self._directory_terms())
        directory.send(_entry(listener))
        address = _address(directory.receive())
        directory.close()
        return address

    def _keep_directory(
        self, listener: socket.socket, *, for_leaders: socket.socket, for_members: socket.socket
    ) -> None:
        links = self._accept(listener, self._directory_terms(), set(range(1, self.size)))
        entries = {rank: link.receive() for rank, link in links.items()} | {0: _entry(for_members)}
        for rank, link in links.items():
            leads = rank % self.group_size == 0
            link.send(_entry(for_leaders) if leads else entries[rank - rank % self.group_size])
            link.close()

    def _members(self) -> set[int]:
        return set(range(self.rank + 1, min(self.rank + self.group_size, self.size)))

    def _terms(self, kind: LinkKind, *, up_rows: int) -> Terms:
        row = WORD * (1 + self.width)
        return Terms(kind=kind, size=self.size, up_bytes=WORD + up_rows * row, down_bytes=WORD + self.size * row)

    def _directory_terms(self) -> Terms:
        return Terms(kind=LinkKind.DIRECTORY, size=self.size, up_bytes=ENTRY_BYTES, down_bytes=ENTRY_BYTES)

    def _control(self, up: Link | None, *, members: Mapping[int, Link], leaders: Mapping[int, Link]) -> SocketControl:
        branches = [Branch(link=members[rank], num_rows=1) for rank in sorted(members)]
        for rank in sorted(leaders):
            branches.append(Branch(link=leaders[rank], num_rows=min(self.group_size, self.size - rank)))
        return SocketControl(
            rank=self.rank, size=self.size, width=self.width, up=up, branches=branches, up_rows=self.group_size
        )

    def _call(self, address: Address, terms: Terms) -> Link:
        return connect(address, rank=self.rank, terms=terms, key=self.key, timeout_s=self.timeout_s)

    def _accept(self, listener: socket.socket, terms: Terms, ranks: set[int]) -> dict[int, Link]:
        """A link from each of `ranks`; the listener is closed when they are all there."""
        links: dict[int, Link] = {}
        missing = set(ranks)
        door = Door(listener, rank=self.rank, terms=terms, key=self.key, waits_for=missing)
        end = time.monotonic() + self.timeout_s
        while missing:
            for link in door.admit(max(0.0, min(1.0, end - time.monotonic()))):
                links[link.peer] = link
                missing.discard(link.peer)
            if missing and time.monotonic() > end:
                door.close()
                seen = f"; refused: {', '.join(door.refusals)}" if door.refusals else ""
                cause = f"did not come to the control plane within {self.timeout_s:g} s{seen}"
                raise PeerFailed(min(missing), cause, rank=self.rank)
        door.close()
        return links


def _entry(listener: socket.socket | None) -> bytes:
    text = ":".join(map(str, listener.getsockname()[:2])) if listener is not None else ""
    return text.encode().ljust(ENTRY_BYTES, b"\0")


def _address(entry: bytes) -> Address:
    host, _, port = entry.rstrip(b"\0").decode().rpartition(":")
    return host, int(port)
