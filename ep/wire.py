"""What a transport between processes stands on: bytes from peer to peer, in order. `mail` says what they mean.

Legend: R ranks.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Channel(IntEnum):
    """Each keeps its own order between two ranks."""

    LETTERS = 0
    PARCELS = 1


class Lost(Exception):
    """A wire does not reach `peer`, or not within the limit. Does not leave the transport."""

    def __init__(self, peer: int, cause: object) -> None:
        super().__init__(str(cause))
        self.peer = peer


class Work(Protocol):
    """Bytes under way. It keeps their memory alive."""

    def wait(self, limit_s: float | None = None) -> None:
        """Until the memory may be used again. Raises Lost, also after limit_s (None: no limit of ours)."""
        ...


class Wire(Protocol):
    """Between this rank and every other one. A receive takes the next send of the peer on that channel."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, peer: int, data: Bytes, channel: Channel) -> Work: ...

    def receive(self, peer: int, into: Bytes, channel: Channel) -> Work:
        """What comes may be shorter than `into`; if it is longer the process may end without a word."""
        ...

    def sever(self) -> None:
        """Nothing goes or comes any more. Peers that wait fail, if the wire has a way to tell them."""
        ...


@dataclass(slots=True, eq=False)
class Outbox:
    """What is under way to one peer, and in which exchange it was sent."""

    wire: Wire
    peer: int
    sent: deque[tuple[int, Work]] = field(default_factory=deque)

    def send(self, number: int, data: Bytes, channel: Channel) -> None:
        """`data` belongs to the outbox from here on."""
        self.sent.append((number, self.wire.send(self.peer, data, channel)))

    def forget(self, before: int) -> None:
        """The peer has what was sent in exchanges before this one. So this wait is a short one."""
        while self.sent and self.sent[0][0] < before:
            self.sent.popleft()[1].wait()

    def flush(self, limit_s: float) -> None:
        """Wait until the peer has everything. Raises Lost if it does not take it within the limit."""
        deadline = time.monotonic() + limit_s
        for _, work in self.sent:
            work.wait(max(0.0, deadline - time.monotonic()))


@dataclass(slots=True, eq=False)
class Inbox:
    """The letters of one peer, in order; receives are posted ahead."""

    wire: Wire
    peer: int
    posted: deque[tuple[Bytes, Work]] = field(default_factory=deque)

    def post(self, letter: Bytes) -> None:
        self.posted.append((letter, self.wire.receive(self.peer, letter, Channel.LETTERS)))

    def take(self, limit_s: float | None = None) -> Bytes:
        """The next letter; post() gives its memory back."""
        self.posted[0][1].wait(limit_s)
        return self.posted.popleft()[0]
