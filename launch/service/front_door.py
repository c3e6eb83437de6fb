"""The front door: a process without a model, between those who ask and the ranks.

    started by a person      it starts rank 0's process with the command's words, which starts the other ranks
    under another launcher   rank 0's process starts it

In both cases rank 0 hands it its papers, and the ranks call it. It ends when it is told to (0), when the ranks have
failed and that was said (1), or when the command was wrong (2, from rank 0, which has said why).

Runs without torch: the rooms that would import it are bare packages here (see `front_start`), so everything that this
process imports takes single modules from them. Knows how a front door begins and ends; what it serves is handed in.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import zmq
from zmq.auth.thread import ThreadAuthenticator

from runtime.ranks.letters import EndLetter
from runtime.ranks.wire_sockets import WireKeys, bind_front

from ..front.front_client import GroupClient, Refused
from ..front.front_group import FrontGroup
from ..front.front_link import FrontLink, RanksOutOfReach
from ..groups.spawn import interrupts_blocked, start_process, this_program
from .front_loop import run_loop
from .front_papers import Address, Papers, read, write
from .front_start import DESCRIPTOR, DONE, ENDING_S, FAILED, INTERRUPTED
from .serve_config import ServeConfig

TELL_S = 4.0
"""After a failure the service may go on so long, to say so."""

UNSERVED_S = 1.0
"""Rank 0 may take so long to end before it has told what to serve: until then it looks at no lifeline."""

Serve = Callable[[GroupClient, ServeConfig], Awaitable[None]]


def main(arguments: Sequence[str]) -> int:
    """`serve WORDS...` for a person's command; `--lifeline DESCRIPTOR` for one that rank 0 has started."""
    from .grpc_server import serve_grpc  # what it serves is looked at here only: all else can do without gRPC

    return run(arguments, serve_grpc)


def run(arguments: Sequence[str], serve: Serve) -> int:
    """A front door's life; returns the exit code."""
    if arguments[0] == "--lifeline":
        with socket.socket(fileno=int(arguments[1])) as lifeline:
            papers = read(lifeline, Papers)
            return FAILED if papers is None else run_loop(FrontDoor(papers, lifeline).live(serve))
    mine, theirs = socket.socketpair()
    with mine:
        process, papers = None, None
        try:
            with _told_by_term() as term:
                with theirs, term.held():
                    process = _start_rank0(arguments, theirs)
                papers = read(mine, Papers)
                if papers is None:
                    return _code(process.wait(ENDING_S))
                code = run_loop(FrontDoor(papers, mine).live(serve))
        except _Told:
            say("told to end before it served")
            code, papers = DONE, None
        except KeyboardInterrupt:
            say("interrupted")
            code = INTERRUPTED
        finally:
            mine.close()
            ended = _end(process, grace_s=ENDING_S if papers is not None else UNSERVED_S) if process else DONE
    return code or (FAILED if ended and papers is not None else DONE)


def say(line: str) -> None:
    """A line on standard error."""
    with suppress(OSError):
        os.write(2, f"serried: {line}\n".encode(errors="backslashreplace"))


class _Told(KeyboardInterrupt):
    """SIGTERM, before there is a service that takes it. An interrupt, for asyncio lets only those through."""


class _Term:
    """What SIGTERM does before there is a service that takes it."""

    def __init__(self) -> None:
        self._holds = self._came = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # a signal handler's
        self._came = True
        if not self._holds:
            raise _Told

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes in here counts at the end: a process that is being started is not lost sight of."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
        if self._came:
            raise _Told


@contextmanager
def _told_by_term() -> Iterator[_Term]:
    """SIGTERM raises _Told in here, until a service takes it over."""
    term = _Term()
    before = signal.signal(signal.SIGTERM, term.on_signal)
    try:
        yield term
    finally:
        signal.signal(signal.SIGTERM, before)


class FrontDoor:
    """The front door of one group."""

    def __init__(self, papers: Papers, lifeline: socket.socket) -> None:
        self._papers = papers
        self._lifeline = lifeline
        self._size = papers.group.size

    async def live(self, serve: Serve) -> int:
        """Serve until the service ends or the group has failed; returns the exit code."""
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            link = FrontLink(self._listen(context, stack), size=self._size)
            group = FrontGroup(link, self._papers.group, say=say)
            loop = asyncio.get_running_loop()
            loop.add_reader(self._lifeline, self._lose_rank0, group)
            telling = asyncio.create_task(_tell(group))
            try:
                code = await self._serve(group, serve)
            finally:
                telling.cancel()
                loop.remove_reader(self._lifeline)
                for rank in range(self._size):
                    with suppress(RanksOutOfReach):
                        link.send(rank, EndLetter())
                await group.close()
        return code

    async def _serve(self, group: FrontGroup, serve: Serve) -> int:
        service = asyncio.ensure_future(serve(group, self._papers.serve))
        failed = asyncio.create_task(group.until_failed())
        await asyncio.wait((service, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await asyncio.wait((service,), timeout=TELL_S)
        failed.cancel()
        if not service.done():
            service.cancel()
        try:
            await service
        except asyncio.CancelledError:
            return FAILED
        except Exception as error:
            if group.health().state != "failed":
                say(f"{type(error).__name__}: {error}" if not isinstance(error, OSError | ValueError) else str(error))
            return FAILED
        return FAILED if group.health().state == "failed" else DONE

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]], stack: ExitStack) -> zmq.Socket[bytes]:
        """The socket for ranks; tells rank 0 where it is."""
        if not self._papers.host:
            folder = stack.enter_context(_private_folder())
            router = bind_front(context, f"ipc://{folder}/ranks", None)
        else:
            keys = WireKeys.of(bytes.fromhex(self._papers.key))
            guard = ThreadAuthenticator(context)
            guard.start()
            stack.callback(guard.stop)
            guard.configure_curve_callback(credentials_provider=Members(keys))
            router = bind_front(context, f"tcp://{self._papers.host}:*", keys)
        write(self._lifeline, Address(wire=router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")))
        return router

    def _lose_rank0(self, group: FrontGroup) -> None:
        if not self._lifeline.recv(1):
            asyncio.get_running_loop().remove_reader(self._lifeline)
            group.suspect("rank 0 failed: its process is gone")


class Members:
    """Who may call the front door from other nodes: who has the ranks' key."""

    def __init__(self, keys: WireKeys) -> None:
        self._public = keys.rank_public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  # pyzmq's protocol
        """See `zmq.auth.CurveZMQ`."""
        return key == self._public


async def _tell(group: FrontGroup) -> None:
    """What the user should know once the ranks are ready."""
    with suppress(Refused):
        await group.info()
        for line in group.notes:
            say(f"note: {line}")


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder that this user alone may enter, for as long as it lasts."""
    folder = Path(tempfile.mkdtemp(prefix="serried-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_rank0(words: Sequence[str], theirs: socket.socket) -> subprocess.Popen[bytes]:
    with interrupts_blocked():
        return start_process(this_program(), words, theirs.fileno(), environ={DESCRIPTOR: str(theirs.fileno())})


def _end(process: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """Wait for rank 0's process, which has been told or sees that its lifeline is gone; the others end with it."""
    try:
        return process.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        say("rank 0 does not end, and is killed")
        process.send_signal(signal.SIGKILL)
        return process.wait()


def _code(ended: int) -> int:
    """An exit code of our own for how another process ended."""
    return ended if ended >= 0 else FAILED
