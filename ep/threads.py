"""N ranks as threads of one process, one running at a time, so that a run repeats exactly.

    rank 0  ##..........####......
    rank 1  ..####..........##....      # has the baton
    rank 2  ......####........####      . waits for it

The rank that runs holds the baton. It keeps it until it waits for an exchange that is not complete; then the next
rank (rank + 1 first, around) that can go on gets it. Whoever posts last copies the rows of all. What the ranks'
function computes is not known here, nor is torch's inference mode or number of threads: both are the function's
business.

Why no set of ranks can wait for each other: exchanges are matched by their order. A rank that waits for its n-th
exchange lacks another rank's n-th post; that rank, if it waits, waits for an earlier one, and so down to a rank that
runs or has ended. Ended ranks are caught when they end, and when somebody posts what they never will.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from .baton import Baton, State
from .errors import PeerFailed, TransportError
from .posts import Collective, Fault, Post
from .transport import Pending, Tag, assert_fit

X = TypeVar("X")

MAX_RANKS = 64
GRACE_S = 5.0
"""How long a stopped group's threads get to notice before they are left behind (they are daemons)."""


class ThreadTransport:
    """One rank's end of a ThreadGroup; see `transport.Transport`. Only its rank's own thread may use it."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        assert_fit(recv, send, recv_splits=recv_splits, send_splits=send_splits, size=self.size)
        assert send.is_contiguous(), send.stride()
        assert recv.is_contiguous(), recv.stride()
        return self._start(Post(tag, send, recv, tuple(send_splits), tuple(recv_splits)))

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        return self._start(Post(tag, row))

    def _start(self, post: Post) -> Pending[Tensor]:
        number = self._group.post(self.rank, post)
        return Pending(partial(self._group.wait, self.rank, number, post))

    def abort(self, cause: BaseException) -> None:
        self._group.fail(self.rank, cause)

    def close(self) -> None:
        self._group.leave(self.rank)


@dataclass(slots=True, eq=False)
class _Member:
    """What a rank has exchanged so far."""

    num_posted: int = 0
    waits_for: int = -1  # the number of an exchange, while it waits


@dataclass(frozen=True, slots=True)
class _Failure:
    first: BaseException
    fault: Fault


class ThreadGroup(Generic[X]):
    """1 to 64 ranks. start(fn) sets them off, join() returns fn's values in rank order or raises the first cause.

    A group that was joined without a failure may start again, with the same transports.

    `timeout_s`: the group is broken when the rank that runs makes no call on its transport for that long. That rank is
    left behind as a daemon thread, all others end. None: no limit.
    """

    def __init__(self, size: int, *, timeout_s: float | None = None) -> None:
        if not 1 <= size <= MAX_RANKS:
            legal = min(max(size, 1), MAX_RANKS)
            raise ValueError(f"size = {size}: one process holds 1 to {MAX_RANKS} ranks, for example {legal}")
        self.size = size
        self.transports = tuple(ThreadTransport(self, rank) for rank in range(size))
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []
        self._finished = threading.Event()
        self._results: list[X | None] = []
        self._mutex = threading.Lock()  # over everything below
        self._baton = Baton(size)
        self._members = [_Member() for _ in range(size)]
        self._gone: set[int] = set()  # ranks that make no more exchanges
        self._open: dict[int, Collective] = {}
        self._num_complete = 0
        self._failure: _Failure | None = None
        self._last_post = time.monotonic()

    @property
    def broken(self) -> BaseException | None:
        """The first cause of failure, None as long as all is well."""
        return self._failure.first if self._failure else None

    def start(self, fn: Callable[[ThreadTransport], X]) -> None:
        """Call fn(transport) once on each rank, rank 0 first. Returns at once."""
        assert not self._threads or self._finished.is_set(), "the group runs already"
        if self._failure is not None:
            raise self._failure.fault(rank=None, step=None)
        self._finished = threading.Event()
        self._results = [None] * self.size
        self._baton = Baton(self.size)
        self._gone.clear()
        self._threads = [
            threading.Thread(target=self._run, args=(fn, rank), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in self._threads:
            thread.start()
        if self._timeout_s is not None:
            watch = threading.Thread(target=self._watch, args=(self._timeout_s, self._finished), daemon=True)
            watch.start()
        with self._mutex:
            self._baton.hand_to(0)

    def join(self) -> list[X]:
        """Wait for all ranks. An interrupt of this wait (Ctrl-C) stops the group and goes on upwards."""
        try:
            self._finished.wait()
        except BaseException as interrupt:
            self.stop(interrupt)
            self._finished.wait(GRACE_S)
            raise
        for state, thread in zip(self._baton.states, self._threads, strict=True):
            if state is not State.LOST:
                thread.join()
        if self._failure is not None:
            raise self._failure.first
        return self._results  # type: ignore[return-value]  # every rank returned

    def stop(self, cause: BaseException) -> None:
        """Break the group from outside: every rank's next call, or the wait it sleeps in, raises TransportError."""
        with self._mutex:
            self._fail(_Failure(cause, partial(TransportError, f"stopped from outside: {cause!r}")))
            self._baton.wake_all()

    def wait_for_end(self, timeout_s: float = GRACE_S) -> bool:
        """Wait until no rank's thread is left, after `stop`; False when one still runs.

        A thread that computes while the program ends would take the program down with it.
        """
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    # For the transports, in the thread of `rank`, which holds the baton.

    def post(self, rank: int, post: Post) -> int:
        """Hand in the next exchange of `rank` and return its number; the last of all ranks to come completes it."""
        with self._mutex:
            self._raise_if_broken(rank, post.tag)
            me = self._members[rank]
            assert rank not in self._gone, f"rank {rank} posts {post.tag} after close()"
            number = me.num_posted
            me.num_posted += 1
            self._last_post = time.monotonic()
            if number not in self._open:
                self._open[number] = Collective(self.size)
            if self._open[number].add(rank, post):
                self._complete(number)
            else:
                self._look_for_gone(number)
                self._raise_if_broken(rank, post.tag)
            return number

    def wait(self, rank: int, number: int, post: Post) -> Tensor:
        """Sleep until exchange `number` is complete and return what `rank` received in it."""
        with self._mutex:
            self._raise_if_broken(rank, post.tag)
            complete = number < self._num_complete
            if not complete:
                self._members[rank].waits_for = number
                self._baton.states[rank] = State.WAITING
                passed = self._baton.pass_on(rank, self._can_go_on)
                assert passed, f"no rank can go on: {self._who_waits()}"
        if not complete:
            self._baton.sleep(rank)
            self._raise_if_broken(rank, post.tag)
        assert post.recv is not None
        return post.recv

    def fail(self, rank: int, cause: BaseException) -> None:
        """`rank` raised `cause`. The first cause counts, later ones are its consequences."""
        with self._mutex:
            self._fail(_Failure(cause, partial(PeerFailed, rank, f"raised {type(cause).__name__}: {cause}")))

    def leave(self, rank: int) -> None:
        """`rank` makes no more exchanges; whoever needs one fails."""
        with self._mutex:
            self._gone.add(rank)
            self._look_for_gone(self._members[rank].num_posted)

    # In the rank's thread and in the watch's.

    def _run(self, fn: Callable[[ThreadTransport], X], rank: int) -> None:
        self._baton.sleep(rank)
        try:
            self._results[rank] = fn(self.transports[rank])
        except BaseException as cause:  # join() raises it in the caller's thread
            cause.add_note(f"raised on rank {rank} of {self.size}")
            self.fail(rank, cause)
        self.leave(rank)
        with self._mutex:
            self._baton.states[rank] = State.ENDED
            if self._baton.all_ended:
                self._finished.set()
            else:
                self._baton.pass_on(rank, self._can_go_on)

    def _watch(self, timeout_s: float, finished: threading.Event) -> None:
        quiet_s = 0.0
        while not finished.wait(timeout_s - quiet_s):
            quiet_s = time.monotonic() - max(self._last_post, self._baton.last_pass)
            if quiet_s >= timeout_s:
                self._leave_behind(timeout_s)
                quiet_s = 0.0

    def _leave_behind(self, timeout_s: float) -> None:
        """Break the group because of the rank that runs; the others end without it."""
        with self._mutex:
            culprit = self._baton.holder
            if culprit is None:  # all have just ended
                return
            frame = sys._current_frames()[self._threads[culprit].ident or 0]
            place = f"{frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
            cause = f"made no exchange for {timeout_s} s and is in {place}; {self._who_waits() or 'nobody waits'}"
            self._fail(_Failure(PeerFailed(culprit, cause), partial(PeerFailed, culprit, cause)))
            self._baton.states[culprit] = State.LOST
            self._baton.wake_all()
            if self._baton.all_ended:
                self._finished.set()

    # Under the mutex.

    def _can_go_on(self, rank: int) -> bool:
        return self._members[rank].waits_for < self._num_complete or self._failure is not None

    def _complete(self, number: int) -> None:
        collective = self._open.pop(number)
        fault = collective.complete()
        if fault is None:
            self._num_complete = number + 1
        else:
            error = fault(rank=collective.arrival[-1], step=collective.tag.step)
            self._fail(_Failure(error, fault))
            raise error

    def _look_for_gone(self, number: int) -> None:
        """Fail if exchange `number` has been posted by some rank and never will be by another."""
        collective = self._open.get(number)
        behind = [rank for rank in self._gone if self._members[rank].num_posted <= number]
        if collective is None or not behind:
            return
        culprit = min(behind)
        count = self._members[culprit].num_posted
        cause = f"ended after {count} exchanges; ranks {sorted(collective.arrival)} need it in {collective.tag}"
        self._fail(_Failure(PeerFailed(culprit, cause), partial(PeerFailed, culprit, cause)))

    def _fail(self, failure: _Failure) -> None:
        if self._failure is None:
            self._failure = failure

    def _raise_if_broken(self, rank: int, tag: Tag) -> None:
        if self._failure is not None:
            raise self._failure.fault(rank=rank, step=tag.step)

    def _who_waits(self) -> str:
        return "; ".join(
            f"rank {rank} waits for {self._open[member.waits_for].tag}"
            for rank, member in enumerate(self._members)
            if self._baton.states[rank] is State.WAITING and member.waits_for in self._open
        )


def run_ranks(size: int, fn: Callable[[ThreadTransport], X], *, timeout_s: float | None = None) -> list[X]:
    """Call fn(transport) on `size` ranks; its values in rank order, or the first cause of a failure is raised."""
    group: ThreadGroup[X] = ThreadGroup(size, timeout_s=timeout_s)
    group.start(fn)
    return group.join()
