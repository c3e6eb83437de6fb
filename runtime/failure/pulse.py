"""The rank's side of its pulse: the board to stamp on, a word when it raises, and the end when somebody has failed.

    with Pulse.start(rank=rank, size=size, hub=..., key=key, directory=folder) as pulse:
        ...                                   # build, load, warm up
        pulse.ready()
        pulse.board.stamp(Phase.PROPOSE, step)    # and so on, in every step

The pulse itself is a process (`pulse_process`). When it has a verdict, a thread here prints one line, writes the flight
record and ends this process with code 1; should that thread be kept from it, the pulse ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from ep.errors import SerriedError, TransportError

from ..control.handshake import Address, check_key
from .bare import bare_command
from .board import Board, Stamp, State
from .flight import last_words, leave_flight, run_name, say
from .judge import Limits
from .pulse_process import VERDICT_BYTE, PulseConfig
from .verdict import BEFORE_STEPS, Phase, Reason, Verdict, one_line

JOIN_S = 10.0
"""A rank that raises in the beginning waits so long for its pulse to reach the others."""

UNHEARD_S = 2.5
"""A rank that has raised waits so long for the group's verdict before it ends alone."""


class Pulse:
    """A rank's pulse. To be started in a thread that lives as long as the process, such as its main thread.

    board        stamp on it in the thread that steps, and nowhere else
    on_verdict   called before the process ends, in any thread; has less than a second
    """

    def __init__(
        self,
        *,
        board: Board,
        process: subprocess.Popen[bytes],
        wake: socket.socket,
        directory: Path | None,
        run: str,
        limits: Limits,
        on_verdict: Callable[[Verdict], None] | None,
    ) -> None:
        self.board = board
        self._process = process
        self._wake = wake
        self._directory = directory
        self._run = run
        self._limits = limits
        self._on_verdict = on_verdict
        self._joined = threading.Event()
        self._closing = threading.Event()
        self._ending = threading.Lock()  # whoever gets it ends the process, nobody gives it back
        self._watcher = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._watcher.start()

    @classmethod
    def start(
        cls,
        *,
        rank: int,
        size: int,
        hub: socket.socket | Address,
        key: bytes,
        directory: Path | None,
        limits: Limits | None = None,
        on_verdict: Callable[[Verdict], None] | None = None,
    ) -> Pulse:
        """Start the process beside this one. Returns at once; whether it reaches the others shows in the verdict.

        hub         where rank 0's pulse listens; on rank 0 the listening socket, which is used up
        key         the group's key; it goes to the pulse over a socket, on no command line and in no environment
        directory   where flight records go, None for nowhere
        """
        check_key(key)
        if isinstance(hub, socket.socket) != (rank == 0):
            raise ValueError(f"hub of rank {rank} is {hub!r}: rank 0 gives the socket that listens, others its address")
        limits = limits if limits is not None else Limits()
        directory = directory.absolute() if directory is not None else None
        board = Board.create(rank=rank, size=size)
        wake, pulse_end = socket.socketpair()
        address = None if isinstance(hub, socket.socket) else hub
        config = PulseConfig(key=key, hub=address, directory=directory, limits=limits).to_bytes()
        wake.sendall(len(config).to_bytes(4, "little") + config)
        process = _spawn(board, pulse_end, hub if isinstance(hub, socket.socket) else None)
        pulse_end.close()
        return cls(
            board=board,
            process=process,
            wake=wake,
            directory=directory,
            run=run_name(key),
            limits=limits,
            on_verdict=on_verdict,
        )

    @property
    def pid(self) -> int:
        """The pulse's process."""
        return self._process.pid

    def warm(self) -> None:
        """What can take long has begun to run: the first steps."""
        self.board.state = State.WARM

    def ready(self) -> None:
        """Warmed up: from the second step on, a step takes as long as it should.

        Waits until the pulse has joined the others, so that none of the steps to come is unwatched. If it cannot, there
        is a verdict, and this process ends.
        """
        self._joined.wait()
        self.board.state = State.READY

    def drain(self) -> None:
        """This rank takes no new requests."""
        self.board.state = State.DRAINING

    def fail(self, error: BaseException, *, step: int | None = None, phase: Phase | None = None) -> NoReturn:
        """Tell the group what this rank has raised, and end with it. step, phase: where, if not at the last stamp.

        An error of the transport is the consequence of another rank's: it waits for that rank's own word, and blames
        the culprit that it names only if none comes.
        """
        verdict = blame(error, rank=self.board.rank, stamp=self.board.last_stamp(), step=step, phase=phase)
        trace = "".join(traceback.format_exception(error))
        self.board.raise_error(verdict, second_hand=isinstance(error, TransportError), trace=trace)
        self._poke()
        self._joined.wait(JOIN_S)
        self._watcher.join(UNHEARD_S)  # it ends the process long before
        self._end_alone(Reason.SILENT, f"its pulse does not answer; {verdict.cause}")

    def close(self) -> None:
        """This rank ends in order. Waits until all ranks do (rank 0) or the hub knows of it (others); twice is once."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.board.state = State.ENDED
        self._poke()
        try:
            self._process.wait(self._limits.leave_s + UNHEARD_S)
        except subprocess.TimeoutExpired:
            say(f"serried: the pulse of rank {self.board.rank} does not end, and is killed")
            self._process.kill()
            self._process.wait()
        self._watcher.join()
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.fail(error)

    def _poke(self) -> None:
        """There is something on the board."""
        with contextlib.suppress(OSError):  # the pulse is gone, and the watcher is about to say so
            self._wake.send(b"!")

    def _watch(self) -> None:
        """Wait for the pulse's word. Its end without one is a failure of this rank, unless this rank ends in order."""
        while word := self._hear():
            self._joined.set()
            if word == VERDICT_BYTE and self.board.verdict is not None:
                self._end(self.board.verdict)
        if not self._closing.is_set():
            self._end_alone(Reason.GONE, "its pulse is gone")

    def _hear(self) -> bytes:
        """One byte of the pulse's; empty at its end."""
        try:
            return self._wake.recv(1)
        except ConnectionResetError:  # it ended before it read everything
            return b""

    def _end_alone(self, reason: Reason, cause: str) -> NoReturn:
        """End without the group's verdict, for this rank's own reasons."""
        self._ending.acquire()
        self._process.kill()
        verdict = _verdict(self.board.rank, reason, one_line(cause), self.board.last_stamp())
        self.board.verdict = verdict
        self._say_and_exit(verdict)

    def _end(self, verdict: Verdict) -> NoReturn:
        """End with the group's verdict. The pulse allows `end_s` for it."""
        self._ending.acquire()
        self._say_and_exit(verdict)

    def _say_and_exit(self, verdict: Verdict) -> NoReturn:
        try:
            say(last_words(verdict, rank=self.board.rank, directory=self._directory))
            self.board.has_spoken = True
            leave_flight(self.board, self._directory, written_by="rank", run=self._run)
            self.board.flight_is_written = True
            if self._on_verdict is not None:
                self._on_verdict(verdict)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as error:
            say(f"serried: rank {self.board.rank} could not end as it should: {type(error).__name__}: {error}")
        finally:
            os._exit(1)


def blame(
    error: BaseException, *, rank: int, stamp: Stamp | None, step: int | None = None, phase: Phase | None = None
) -> Verdict:
    """The verdict that an exception on `rank` is worth alone: against itself, or the culprit that the error names."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    culprit = getattr(error, "culprit", rank) if isinstance(error, SerriedError) else rank
    if culprit != rank:
        return Verdict(culprit=culprit, reason=Reason.LOST, cause=one_line(f"rank {rank} raised {text}"))
    verdict = _verdict(rank, Reason.RAISED, one_line(f"raised {text}"), stamp)
    return Verdict(
        culprit=rank,
        reason=verdict.reason,
        cause=verdict.cause,
        step=verdict.step if step is None else step,
        phase=verdict.phase if phase is None else phase,
        layer=verdict.layer if phase in (None, verdict.phase) else 0,
    )


def _verdict(rank: int, reason: Reason, cause: str, stamp: Stamp | None) -> Verdict:
    if stamp is None:
        return Verdict(culprit=rank, reason=reason, cause=cause, step=BEFORE_STEPS)
    return Verdict(culprit=rank, reason=reason, cause=cause, step=stamp.step, phase=stamp.phase, layer=stamp.layer)


def _spawn(board: Board, pulse_end: socket.socket, listener: socket.socket | None) -> subprocess.Popen[bytes]:
    """The process, with three descriptors of this one and no other."""
    descriptors = [board.descriptor, pulse_end.fileno()] + ([listener.fileno()] if listener is not None else [])
    arguments = [*map(str, descriptors), *([] if listener is not None else ["-1"])]
    process = subprocess.Popen(
        bare_command("runtime.failure.pulse_process", *arguments),
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
    )
    if listener is not None:
        listener.close()
    return process
