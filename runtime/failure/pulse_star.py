"""How pulses speak to each other: every pulse has a link to the pulse of rank 0, the hub, which judges for all.

    spoke -> hub    BEAT observation, FAULT verdict          hub -> spoke    BEAT, VERDICT verdict

The first cause that reaches the hub is the group's. A spoke that hears nothing of the hub says so by itself: then rank
0 is the culprit. Nothing here waits, except for the beginning and the end. Knows links and rules; does not know
processes.
"""

from __future__ import annotations

import selectors
import socket
import time
from enum import IntEnum
from typing import Protocol

from ..control.door import Door
from ..control.frames import Link, LinkClosed, LinkError
from ..control.handshake import Address, LinkKind, Terms, connect
from .board import State
from .judge import OBSERVATION_BYTES, Limits, Observation, Seen, judge, silent_after
from .patient import Fault
from .verdict import UNKNOWN_STEP, VERDICT_BYTES, Reason, Verdict, pack_verdict, unpack_verdict

_HEAD_BYTES = 2
PULSE_BYTES = _HEAD_BYTES + max(VERDICT_BYTES, OBSERVATION_BYTES)
FAREWELL_S = 2.0
"""How long the hub stays to tell everybody the verdict."""


class _Kind(IntEnum):
    BEAT = 0
    FAULT = 1
    VERDICT = 2


def _message(kind: _Kind, body: bytes = b"", *, flag: bool = False) -> bytes:
    return (bytes([kind, flag]) + body).ljust(PULSE_BYTES, b"\0")


def _terms(size: int) -> Terms:
    return Terms(kind=LinkKind.PULSE, size=size, up_bytes=PULSE_BYTES, down_bytes=PULSE_BYTES)


class Star(Protocol):
    """A pulse's place among the pulses. `now`: the pulse's own clock, which stands still while it does."""

    def fileno(self) -> int:
        """Readable when `read` has something to do."""
        ...

    def read(self, now: float, /) -> None:
        """Take in what has arrived."""
        ...

    def beat(self, observation: Observation, now: float, /) -> None:
        """Say how this pulse's own rank is."""
        ...

    def report(self, fault: Fault, now: float, /) -> None:
        """Say what is wrong with the own rank; saying it again changes nothing."""
        ...

    def verdict(self, now: float, /) -> Verdict | None:
        """What the group has found, once there is something."""
        ...

    def may_leave(self) -> bool:
        """The own rank has ended in order; whether nobody needs this pulse any more."""
        ...

    def tell(self, verdict: Verdict) -> None:
        """Pass on what ends the group."""
        ...

    def leave(self) -> None:
        """See that the last word has arrived, and end all links."""
        ...


class Hub:
    """The pulse of rank 0."""

    def __init__(self, listener: socket.socket, *, size: int, key: bytes, limits: Limits, now: float) -> None:
        self._size = size
        self._limits = limits
        self._since = now
        self._missing = set(range(1, size))
        self._links: dict[int, Link] = {}
        self._seen: dict[int, Seen] = {}
        self._verdict: Verdict | None = None
        self._second_hand: tuple[Verdict, float] | None = None
        self._selector = selectors.EpollSelector()
        self._door = Door(listener, rank=0, terms=_terms(size), key=key, waits_for=self._missing)
        self._selector.register(self._door, selectors.EVENT_READ)
        self._shut_when_all_are_here()

    def fileno(self) -> int:
        return self._selector.fileno()

    def read(self, now: float) -> None:
        for item, _ in self._selector.select(0):
            if item.fileobj is self._door:
                self._admit()
            else:
                self._hear(item.data, now)

    def beat(self, observation: Observation, now: float) -> None:
        self._seen[0] = Seen(observation=observation, at=self._heard_at(observation, now))
        for rank in list(self._links):
            self._post(rank, _message(_Kind.BEAT))
        self._verdict = self._verdict or judge(
            self._seen, size=self._size, since=self._since, now=now, limits=self._limits
        )

    def report(self, fault: Fault, now: float) -> None:
        if not fault.second_hand:
            self._verdict = self._verdict or fault.verdict
        elif self._second_hand is None:
            self._second_hand = (fault.verdict, now)

    def verdict(self, now: float) -> Verdict | None:
        if self._verdict is None and self._second_hand is not None:
            said, at = self._second_hand
            self._verdict = self._located(said) if now - at > self._limits.second_hand_s else None
        return self._verdict

    def _located(self, said: Verdict) -> Verdict:
        """What one rank says of another, with where that one stood."""
        last = self._seen.get(said.culprit)
        return (
            last.observation.blame(said.reason, said.cause) if last is not None and said.step == UNKNOWN_STEP else said
        )

    def may_leave(self) -> bool:
        """When all have ended; who comes late is told until then."""
        return len(self._seen) == self._size and all(
            last.observation.state is State.ENDED for last in self._seen.values()
        )

    def tell(self, verdict: Verdict) -> None:
        self._verdict = verdict
        for rank in list(self._links):
            self._post(rank, _message(_Kind.VERDICT, pack_verdict(verdict)))

    def leave(self) -> None:
        end = time.monotonic() + FAREWELL_S
        while self._verdict is not None and (self._links or self._missing) and time.monotonic() < end:
            self._selector.select(0.05)
            self.read(self._since)  # only who leaves and who comes matters from now on
        for link in self._links.values():
            link.close()
        if self._missing:
            self._door.close()

    def _admit(self) -> None:
        for link in self._door.admit():
            self._missing.discard(link.peer)
            self._links[link.peer] = link
            self._selector.register(link, selectors.EVENT_READ, data=link.peer)
            if self._verdict is not None:  # it comes late, and is told at once
                self._post(link.peer, _message(_Kind.VERDICT, pack_verdict(self._verdict)))
        self._shut_when_all_are_here()

    def _shut_when_all_are_here(self) -> None:
        if not self._missing:
            self._selector.unregister(self._door)
            self._door.close()

    def _post(self, rank: int, message: bytes) -> None:
        try:
            self._links[rank].post(message)
        except LinkError as error:
            self._lose(rank, error)

    def _hear(self, rank: int, now: float) -> None:
        try:
            for message in self._links[rank].receive_ready():
                self._take(rank, message, now)
        except LinkError as error:
            self._lose(rank, error)

    def _take(self, rank: int, message: bytes, now: float) -> None:
        body = message[_HEAD_BYTES:]
        if message[0] == _Kind.BEAT:
            observation = Observation.unpack(body[:OBSERVATION_BYTES])
            self._seen[rank] = Seen(observation=observation, at=self._heard_at(observation, now))
        elif message[0] == _Kind.FAULT:
            self.report(Fault(verdict=unpack_verdict(body[:VERDICT_BYTES]), second_hand=bool(message[1])), now)

    def _heard_at(self, observation: Observation, now: float) -> float:
        """Of a rank that has ended: when that was heard first."""
        last = self._seen.get(observation.rank)
        return last.at if last is not None and last.observation.state is State.ENDED else now

    def _lose(self, rank: int, error: LinkError) -> None:
        """A link is gone: that is a failure unless its rank has ended in order."""
        link = self._links.pop(rank)
        self._selector.unregister(link)
        link.close()
        last = self._seen.get(rank)
        if last is not None and last.observation.state is State.ENDED:
            return
        gone = isinstance(error, LinkClosed)
        reason, cause = Reason.GONE if gone else Reason.LOST, "its pulse is gone" if gone else f"its pulse: {error}"
        if last is not None:
            self._verdict = self._verdict or last.observation.blame(reason, cause)
        else:
            self._verdict = self._verdict or Verdict(culprit=rank, reason=reason, cause=cause)


class Spoke:
    """The pulse of any other rank."""

    def __init__(self, hub: Address, *, rank: int, size: int, key: bytes, limits: Limits, now: float) -> None:
        self._link = connect(hub, rank=rank, terms=_terms(size), key=key, timeout_s=limits.come_s)
        self._limits = limits
        self._heard = now
        self._state = State.STARTING
        self._reported = False
        self._verdict: Verdict | None = None

    def fileno(self) -> int:
        return self._link.fileno()

    def read(self, now: float) -> None:
        try:
            for message in self._link.receive_ready():
                self._heard = now
                if message[0] == _Kind.VERDICT:
                    self._verdict = self._verdict or unpack_verdict(message[_HEAD_BYTES:][:VERDICT_BYTES])
        except LinkError as error:
            self._lose(error)

    def beat(self, observation: Observation, _now: float) -> None:
        self._state = observation.state
        self._post(_message(_Kind.BEAT, observation.pack()))

    def report(self, fault: Fault, _now: float) -> None:
        if not self._reported:
            self._post(_message(_Kind.FAULT, pack_verdict(fault.verdict), flag=fault.second_hand))
            self._reported = True

    def verdict(self, now: float) -> Verdict | None:
        silence = now - self._heard
        if self._verdict is None and silence > silent_after(self._state, self._limits):
            cause = f"nothing was heard of its pulse, the hub, for {silence:.1f} s"
            self._verdict = Verdict(culprit=0, reason=Reason.SILENT, cause=cause)
        return self._verdict

    def may_leave(self) -> bool:
        return True

    def tell(self, verdict: Verdict) -> None:
        """The hub told this one."""

    def leave(self) -> None:
        self._link.finish(FAREWELL_S if self._verdict is None else 0.1)

    def _post(self, message: bytes) -> None:
        try:
            self._link.post(message)
        except LinkError as error:
            self._lose(error)

    def _lose(self, error: LinkError) -> None:
        cause = "its pulse, the hub, is gone" if isinstance(error, LinkClosed) else f"its pulse, the hub: {error}"
        self._verdict = self._verdict or Verdict(culprit=0, reason=Reason.GONE, cause=cause)
