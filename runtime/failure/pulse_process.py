"""The small process beside every rank: it feels the rank's pulse, tells the others, and ends the rank when one failed.

Its own process, because a rank that hangs in a collective cannot speak for itself, and a thread of the rank may be kept
silent by whoever holds the interpreter. Started by `pulse`, without torch (see `bare`). Ends when its rank has ended.

    beat, every 0.25 s     look at the rank, tell the hub, hear from the hub
    verdict                on the board, and the rank ends itself; after 1 s it is killed
    end                    the flight record, if the rank could not write it

While it watches it opens no file and never waits for anything but its next beat.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..control.frames import LinkError
from ..control.handshake import Address
from .board import Board, State
from .flight import last_words, leave_flight, run_name, say
from .judge import Limits
from .patient import Patient
from .pulse_star import Hub, Spoke, Star
from .verdict import Reason, Verdict

JOINED_BYTE, VERDICT_BYTE = b"J", b"V"
"""What the pulse says to the rank: it has joined the others; there is a verdict on the board."""

_PR_SET_PDEATHSIG = 1
_LAST_SECONDS = 10
"""The end takes no longer, whatever hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseConfig:
    """What a pulse is told at its start, on the socket from its rank; the key is on no command line."""

    key: bytes
    hub: Address | None
    """Where rank 0's pulse listens; None for that one itself."""
    directory: Path | None
    """Where flight records go; None: nowhere."""
    limits: Limits

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "key": self.key.hex(),
                "hub": self.hub,
                "directory": None if self.directory is None else str(self.directory),
                "limits": asdict(self.limits),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, encoded: bytes) -> PulseConfig:
        found = json.loads(encoded)
        return cls(
            key=bytes.fromhex(found["key"]),
            hub=None if found["hub"] is None else (found["hub"][0], found["hub"][1]),
            directory=None if found["directory"] is None else Path(found["directory"]),
            limits=Limits(**found["limits"]),
        )


def main(arguments: Sequence[str]) -> None:
    """The process: descriptors of the board, of the socket to the rank, and of the hub's listener (-1: not the hub)."""
    board_fd, rank_fd, listener_fd = map(int, arguments)
    board = Board.attach(board_fd)
    _die_with_parent(board.pid)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the rank decides what they mean; the pulse lives as long as it does
    to_rank = socket.socket(fileno=rank_fd)
    config = PulseConfig.from_bytes(_read_config(to_rank))
    listener = socket.socket(fileno=listener_fd) if listener_fd >= 0 else None
    PulseProcess(board, to_rank, config, listener).run()


def _die_with_parent(parent: int) -> None:
    """Until the pulse watches its rank, the system does: SIGTERM when the thread that started the pulse ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the rank ended before its pulse began")


def _read_config(to_rank: socket.socket) -> bytes:
    """Four bytes of length, and as many bytes."""
    head = to_rank.recv(4, socket.MSG_WAITALL)
    return to_rank.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)


class OwnClock:
    """Time as this process lives it: while it is not run (stopped, asleep with the machine), it stands still.

    So nobody is called silent or stuck for what this process has missed itself.
    """

    def __init__(self, *, longest_s: float) -> None:
        self.now = 0.0
        self._longest_s = longest_s
        self._last = time.monotonic()

    def tick(self) -> float:
        """Go on to now; the seconds since the last tick, a gap counted as `longest_s`."""
        last, self._last = self._last, time.monotonic()
        elapsed_s = min(self._last - last, self._longest_s)
        self.now += elapsed_s
        return elapsed_s


class PulseProcess:
    """See the module."""

    def __init__(
        self, board: Board, to_rank: socket.socket, config: PulseConfig, listener: socket.socket | None
    ) -> None:
        self._board = board
        self._to_rank = to_rank
        self._config = config
        self._limits = config.limits
        self._listener = listener
        self._clock = OwnClock(longest_s=4 * config.limits.beat_s)
        self._patient = Patient(board, config.limits)

    def run(self) -> None:
        """Watch until the rank has ended in order, or else see to its end."""
        try:
            star = self._join()
        except LinkError as error:
            cause = f"its pulse found no hub: {error}"
            self._end_rank(Verdict(culprit=self._board.rank, reason=Reason.LOST, cause=cause))
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on the rank's end is a thing to be told
        self._say(JOINED_BYTE)
        verdict = self.watch(star)
        signal.alarm(_LAST_SECONDS)
        if verdict is not None:
            star.tell(verdict)
            self._end_rank(verdict)
        star.leave()

    def watch(self, star: Star) -> Verdict | None:
        """Beat after beat, until the group has a verdict, or the rank has ended in order (None)."""
        with selectors.EpollSelector() as selector:
            for source in (star, self._patient, self._to_rank):
                selector.register(source, selectors.EVENT_READ)
            next_beat, elapsed_s, has_ended = 0.0, 0.0, False
            while True:
                due = False
                for item, _ in selector.select(max(0.0, next_beat - self._clock.now)):
                    if item.fileobj is self._patient or (item.fileobj is self._to_rank and not self._drain()):
                        selector.unregister(item.fileobj)  # it stays readable for good
                    due = due or item.fileobj is not star
                elapsed_s += self._clock.tick()
                now = self._clock.now
                star.read(now)
                if due or now >= next_beat:
                    has_ended = self._beat(star, elapsed_s)
                    next_beat, elapsed_s = now + self._limits.beat_s, 0.0
                verdict = star.verdict(now)
                if verdict is not None or (has_ended and star.may_leave()):
                    return verdict

    def _beat(self, star: Star, elapsed_s: float) -> bool:
        """Look at the rank and tell the others; whether it has ended in order."""
        observation, fault = self._patient.look(elapsed_s)
        if fault is not None:
            star.report(fault, self._clock.now)
        star.beat(observation, self._clock.now)
        return observation.state is State.ENDED

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the rank is gone already
            self._to_rank.send(word)

    def _drain(self) -> bool:
        """Read what woke this process: the rank has something on its board. False at the end of the socket."""
        try:
            return bool(self._to_rank.recv(64, socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _join(self) -> Star:
        size, key, limits, now = self._board.size, self._config.key, self._limits, self._clock.now
        if self._listener is not None:
            return Hub(self._listener, size=size, key=key, limits=limits, now=now)
        assert self._config.hub is not None, "a pulse that does not listen has an address to call"
        return Spoke(self._config.hub, rank=self._board.rank, size=size, key=key, limits=limits, now=now)

    def _end_rank(self, verdict: Verdict) -> None:
        """The rank learns why and ends itself; if it cannot, it is ended, and this process does what it should have."""
        self._board.verdict = verdict
        self._say(VERDICT_BYTE)
        ended_itself = self._patient.wait_gone(self._limits.end_s)
        if not ended_itself:
            self._patient.kill()
        if not ended_itself and not self._board.has_spoken:
            say(last_words(verdict, rank=self._board.rank, directory=self._config.directory))
        if not self._board.flight_is_written:
            config = self._config
            leave_flight(self._board, config.directory, written_by="pulse", run=run_name(config.key))
        self._patient.wait_gone(self._limits.end_s)
