"""The links between the front, in rank 0's process, and every other rank's process; letters go over them."""

from __future__ import annotations

import socket
import time

from ep import PeerFailed

from ..control.door import Door
from ..control.frames import Link
from ..control.handshake import Address, LinkKind, Terms, connect
from .letters import FRAME_BYTES


def call_front(address: Address, *, rank: int, size: int, key: bytes, timeout_s: float = 60.0) -> Link:
    """A rank's link to the front. Raises LinkClosed when nobody answers, WrongKey or WrongPeer for a stranger."""
    return connect(address, rank=rank, terms=_terms(size), key=key, timeout_s=timeout_s)


def accept_ranks(listener: socket.socket, *, size: int, key: bytes, timeout_s: float = 60.0) -> dict[int, Link]:
    """The front's links, by rank; `listener` is used up. Raises PeerFailed naming the first rank that does not come."""
    missing = set(range(1, size))
    links: dict[int, Link] = {}
    door = Door(listener, rank=0, terms=_terms(size), key=key, waits_for=missing)
    until = time.monotonic() + timeout_s
    try:
        while missing:
            left = until - time.monotonic()
            if left <= 0:
                raise PeerFailed(min(missing), f"has not called the front within {timeout_s:g} s", rank=0)
            for link in door.admit(left):
                links[link.peer] = link
                missing.discard(link.peer)
    finally:
        door.close()
    return links


def _terms(size: int) -> Terms:
    return Terms(kind=LinkKind.FRONT, size=size, up_bytes=FRAME_BYTES, down_bytes=FRAME_BYTES)
