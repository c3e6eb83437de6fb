"""A pulse's finger on its rank: is the process there, does it run, does it stamp, has it raised?

Knows one process and its board; does not know the other ranks. A look costs some tens of microseconds, takes nothing
from the rank, and opens no file: what it reads under /proc was opened in the beginning, so a file system that hangs
hangs no pulse.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
from dataclasses import dataclass

from .board import Board, State
from .judge import Limits, Observation
from .verdict import Reason, Verdict

_PIDFD_INFO = struct.Struct("<Q52xi")
"""struct pidfd_info of the kernel: its mask, and the exit code at the end of its first 64 bytes."""
_PIDFD_GET_INFO = 0xC040_FF0B
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a pulse finds wrong with its own rank. second_hand: its error is the consequence of another rank's."""

    verdict: Verdict
    second_hand: bool


class Patient:
    """The rank behind a board. Raises ProcessLookupError when it is gone before the first look."""

    def __init__(self, board: Board, limits: Limits) -> None:
        self._board = board
        self._limits = limits
        self._process = os.pidfd_open(board.pid)
        self._poll = select.poll()
        self._poll.register(self._process, select.POLLIN)
        self._status = os.open(f"/proc/{board.pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        self._stat = os.open(f"/proc/{board.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._stopped_s = 0.0
        self._num_switches = -1
        self._idle_s = 0.0
        self._num_stamps = 0
        self._first_step: int | None = None  # after it was ready

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._process

    @property
    def is_gone(self) -> bool:
        return self.wait_gone(0.0)

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether the process has ended, within `timeout_s`."""
        return bool(self._poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """End the process, also one that is stopped."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                signal.pidfd_send_signal(self._process, number)
            except ProcessLookupError:
                return

    def look(self, elapsed_s: float) -> tuple[Observation, Fault | None]:
        """What there is to see now. `elapsed_s`: the pulse's own time since the last look, without its own gaps."""
        is_gone = self.is_gone  # before the board: what it wrote before its end is there
        observation = self._observe(elapsed_s)
        if self._board.state is State.ENDED:
            return observation, None
        error = self._board.error
        if error is not None:
            return observation, Fault(verdict=error, second_hand=self._board.error_is_second_hand)
        if is_gone:
            return observation, self._fault(observation, Reason.GONE, self._how_it_ended())
        self._feel(elapsed_s)
        if self._stopped_s > self._limits.stopped_s:
            cause = f"its process is stopped, for {self._stopped_s:.1f} s now (state T)"
            return observation, self._fault(observation, Reason.STOPPED, cause)
        return observation, None

    def _fault(self, observation: Observation, reason: Reason, cause: str) -> Fault:
        return Fault(verdict=observation.blame(reason, cause), second_hand=False)

    def _observe(self, elapsed_s: float) -> Observation:
        board = self._board
        state, stamp, num_stamps = board.state, board.last_stamp(), board.num_stamps
        self._idle_s = 0.0 if num_stamps != self._num_stamps else self._idle_s + elapsed_s
        self._num_stamps = num_stamps
        if self._first_step is None and state >= State.READY and stamp is not None:
            self._first_step = stamp.step
        return Observation(
            rank=board.rank,
            state=state,
            settled=self._first_step is not None and stamp is not None and stamp.step > self._first_step,
            stamp=stamp,
            idle_s=self._idle_s,
            predicted_s=board.predicted_s,
        )

    def _feel(self, elapsed_s: float) -> None:
        """Count how long the process has been stopped. One that ran since the last look has switched in between."""
        stopped, num_switches = self._state_and_switches()
        still = stopped and num_switches == self._num_switches
        self._stopped_s = self._stopped_s + elapsed_s if still else 0.0
        self._num_switches = num_switches

    def _state_and_switches(self) -> tuple[bool, int]:
        """Whether the state is T, and how often its main thread was put on a core or taken from it."""
        fields = {}
        try:
            for line in os.pread(self._status, 1 << 14, 0).decode(errors="replace").splitlines():
                name, _, value = line.partition(":")
                fields[name] = value.split()
        except ProcessLookupError:  # it ended just now; the next look says so
            return False, -1
        switches = sum(int(fields[name][0]) for name in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
        return fields["State"][0] == "T", switches

    def _how_it_ended(self) -> str:
        status = self._wait_status()
        if status is None:
            return "its process has ended without a word"
        if os.WIFSIGNALED(status):
            return f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"its process has ended with code {os.WEXITSTATUS(status)} and without a word"

    def _wait_status(self) -> int | None:
        """What the parent is told of the end: /proc says it until the parent knows, Linux from 6.15 on also later."""
        with contextlib.suppress(ProcessLookupError):
            return int(os.pread(self._stat, 1 << 12, 0).split()[-1])
        with contextlib.suppress(OSError):
            info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
            fcntl.ioctl(self._process, _PIDFD_GET_INFO, info)
            mask, status = _PIDFD_INFO.unpack(info)
            return status if mask & _PIDFD_INFO_EXIT else None
        return None
