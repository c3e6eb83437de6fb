"""The front door's end of the wire: letters of ranks as they come, in the event loop's thread.

Knows sockets and letters; does not know what is made of them (see `front_group`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq

from ep.errors import SerriedError
from runtime.ranks.letters import ToRank
from runtime.ranks.wire import FailedLetter, WireError, WireToFront, WireToRank, pack, unpack_at_front
from runtime.ranks.wire_sockets import has_message, identity_of, rank_of

AT_ONCE = 64
"""Letters that are taken before others of this process have their turn."""

HEAD, REST = zmq.NOBLOCK | zmq.SNDMORE, zmq.NOBLOCK

Hear = Callable[[int | None, WireToFront], None]
"""A letter and its rank; None for one who has no rank, and may say nothing but who failed."""


class RanksOutOfReach(SerriedError):
    """A letter cannot be brought to its rank."""


class RankLink(Protocol):
    """How a front door reaches its ranks."""

    def start(self, hear: Hear, lose: Callable[[str], None]) -> None:
        """From now on letters are told to `hear`; `lose` is told, in words, of a rank that does not speak right."""
        ...

    def send(self, rank: int, letter: ToRank | WireToRank) -> None:
        """Raises RanksOutOfReach."""
        ...

    def close(self) -> None: ...


class FrontLink:
    """See `RankLink`. `socket` is a front door's (see `wire_sockets`); who has no place there is counted, not heard."""

    def __init__(self, socket: zmq.Socket[bytes], *, size: int) -> None:
        self._socket = socket
        self._size = size
        self.num_refused = 0

    def start(self, hear: Hear, lose: Callable[[str], None]) -> None:
        """For the protocol see `RankLink`."""
        self._hear, self._lose = hear, lose
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._read)
        self._loop.call_soon(self._read)

    def send(self, rank: int, letter: ToRank | WireToRank) -> None:
        """For the protocol see `RankLink`."""
        message = pack(letter)  # before its head is sent: what cannot be packed must not leave half a message
        try:
            self._socket.send(identity_of(rank), HEAD)
            self._socket.send(message, REST)
        except zmq.ZMQError as error:
            raise RanksOutOfReach(f"rank {rank} is out of reach: {error}") from error
        self._look_again()

    def close(self) -> None:
        """Leave; what was sent may take a moment to be on its way. Closing twice is the same as once."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(2000)

    def _look_again(self) -> None:
        # The descriptor tells of a change once; what happened during a call of ours is seen by asking only.
        if has_message(self._socket):
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            if self._socket.closed or not has_message(self._socket):
                return
            identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            self._take(identity, parts)
        self._loop.call_soon(self._read)

    def _take(self, identity: bytes, parts: list[bytes]) -> None:
        rank = rank_of(identity)
        if rank is not None and rank >= self._size:
            self.num_refused += 1
            return
        try:
            letter = unpack_at_front(b"".join(parts))
        except WireError as error:
            self.num_refused += 1
            if rank is not None:
                self._lose(f"rank {rank} does not speak as it should: {error}")
            return
        if rank is None and not isinstance(letter, FailedLetter):
            self.num_refused += 1
            return
        self._hear(rank, letter)
