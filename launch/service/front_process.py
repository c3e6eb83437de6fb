"""The front door's process as rank 0's process sees it: given to it when it starts, or started by it.

    started by a person      the front door came first, and an environment variable names the lifeline to it
    under another launcher   there is none yet: rank 0 starts it, and hands SIGTERM on to it

Knows processes and the lifeline; imports nothing of the engine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NoReturn, Self

from ep.errors import SerriedError

from .front_papers import Address, Papers, read, write
from .front_start import DESCRIPTOR, DONE, ENDING_S, FAILED, front_command


class FrontProcess:
    """Rank 0's end. As a context: a front door that rank 0 started has ended when it is left."""

    def __init__(self) -> None:
        number = os.environ.pop(DESCRIPTOR, None)
        self._process: subprocess.Popen[bytes] | None = None
        self._trusted = False
        if number is not None:
            self._lifeline = socket.socket(fileno=int(number))
            self._lifeline.set_inheritable(False)
            return
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            command = front_command("--lifeline", str(theirs.fileno()))
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        signal.signal(signal.SIGTERM, self._hand_on)

    def open(self, papers: Papers) -> str:
        """Hand the papers over; where ranks find the front door. This process ends when the front door does not live
        to see the ranks. Raises SerriedError when it has not opened."""
        with suppress(OSError):
            write(self._lifeline, papers)
        address = read(self._lifeline, Address)
        if address is None:
            raise SerriedError("the front door has not opened; if it said something itself, that is the cause")
        self._watcher = threading.Thread(target=self._end_with_it, name="front door", daemon=True)
        self._watcher.start()
        return address.wire

    def trust_wire(self) -> None:
        """From now on the wire tells when the front door is gone."""
        self._trusted = True

    def wait(self) -> int:
        """The exit code of a front door that rank 0 started, when it has ended; else nothing to wait for."""
        return DONE if self._process is None else abs(self._process.wait(ENDING_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifeline.close()
        if self._process is not None:
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _end_with_it(self) -> None:
        with suppress(OSError):
            self._lifeline.recv(1)
        if not self._trusted:
            _end("rank 0 ends: the front door is gone")

    def _hand_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # a signal handler's
        assert self._process is not None, "only a front door of our own is told"
        self._process.send_signal(signal.SIGTERM)


def _end(line: str) -> NoReturn:
    os.write(2, f"serried: {line}\n".encode())
    os._exit(FAILED)
