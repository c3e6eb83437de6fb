"""serried's own launcher: rank 0 is the process that a person started, and this starts the others beside it.

So Ctrl-C, standard output and the exit code are that process's own. The others get the same command line, one thread
of arithmetic each, no standard output, and everything secret over a descriptor (see `as_rank`). Knows processes; does
not know what they run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from ep.errors import PeerFailed

from .as_rank import letter, words_for_child
from .house import home
from .invitation import Invitation

CLOSE_S = 10.0
"""How long the others may take to end once rank 0 is done."""
FAIL_S = 2.0
"""The same, when rank 0 ends by an error or Ctrl-C."""


class OwnRanks:
    """The processes of ranks 1 and up. As a context, it is left when they have all ended, of themselves or not."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]], lifelines: Sequence[socket.socket]) -> None:
        self.processes = processes
        self._lifelines = lifelines

    def check(self) -> None:
        """Raises PeerFailed when one of them has ended; for the time in which that must not happen."""
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None:
                raise PeerFailed(rank, f"ended while the group was starting: {_ending(code) or 'exit code 0'}", rank=0)

    def wait(self, *, grace_s: float = CLOSE_S) -> dict[int, str]:
        """Wait for all of them, `grace_s` in all, then kill; who did not end well, and how, in words."""
        end = time.monotonic() + grace_s
        try:
            for process in self.processes.values():
                _wait_until(process, end)
        finally:  # also when a second Ctrl-C comes while this waits
            late = [rank for rank, process in self.processes.items() if process.poll() is None]
            for rank in late:
                self.processes[rank].kill()
            for process in self.processes.values():
                process.wait()
            for lifeline in self._lifelines:
                lifeline.close()
        endings = {rank: _ending(process.returncode) for rank, process in self.processes.items()}
        endings |= dict.fromkeys(late, f"did not end within {grace_s:g} s and was killed")
        return {rank: ending for rank, ending in sorted(endings.items()) if ending}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait(grace_s=CLOSE_S if error is None else FAIL_S)


def start_ranks(
    words: Sequence[str], *, size: int, invitation: Invitation, command: Sequence[str] | None = None
) -> OwnRanks:
    """Start ranks 1 to `size` - 1 with the command line's `words`. Call it in the main thread: they end with it.

    command   what to run instead of `python -m launch`

    An interrupt from the keyboard reaches this process alone; the others have it blocked, and end when rank 0 says so.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    lifelines: list[socket.socket] = []
    try:
        with interrupts_blocked():
            for rank in range(1, size):
                mine, theirs = socket.socketpair()
                lifelines.append(mine)
                with theirs:
                    child_words = words_for_child(rank, size, theirs.fileno(), words)
                    processes[rank] = start_process(command or this_program(), child_words, theirs.fileno())
                mine.sendall(letter(invitation))
    except BaseException:
        OwnRanks(processes, lifelines).wait(grace_s=0.0)
        raise
    return OwnRanks(processes, lifelines)


def start_process(
    command: Sequence[str], words: Sequence[str], descriptor: int, *, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process of serried's: it finds the rooms, has one thread of arithmetic, and inherits one descriptor."""
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ | dict(environ or {})
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home()), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [*command, *words],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environ,
    )


def this_program() -> list[str]:
    """The command line of `serried`, without its words."""
    # -P: without it the folder that the person is in comes first, where `moe` or `runtime` may be something else
    return [sys.executable, "-P", "-m", "launch"]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes that are started inside have SIGINT blocked for life; one that comes meanwhile is delivered after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_until(process: subprocess.Popen[bytes], end: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - time.monotonic()))


def _ending(code: int) -> str:
    """How a process ended, in words; "" if well."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""
