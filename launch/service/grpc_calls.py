"""Which requests are being answered, for whom, and who does not read: the service's own book.

    id          one request of an id at a time; ids that were aborted or ended lately are remembered, a bounded number
    connection  only so many requests at a time
    reader      a message that a client does not take for too long ends its request: it never holds up the others

Knows calls by name and task; does not know messages or the group.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from .grpc_faults import Fault
from .serve_config import LimitsConfig

REMEMBERED = 4096
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class Call:
    """One Generate under way. `writing_since` is set while a message of it is on its way out."""

    request_id: str
    task: asyncio.Task[object] | None
    writing_since: float | None = None
    dropped: bool = field(default=False)


class Calls:
    """The calls under way."""

    def __init__(self, limits: LimitsConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._running: dict[str, Call] = {}
        self._by_peer: Counter[str] = Counter()
        self._ended: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def enter(self, request_id: str, peer: str) -> Iterator[Call]:
        """A call of this id on the connection `peer`, for as long as it lasts. Raises Fault."""
        if request_id in self._running:
            raise Fault(grpc.StatusCode.ALREADY_EXISTS, f"request {request_id!r} is running", reason="id_in_use")
        most = self._limits.max_requests_per_connection
        if self._by_peer[peer] >= most:
            raise Fault(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this connection has {most} requests running, as many as it may",
                reason="connection_requests",
                retry_after_s=RETRY_S,
            )
        call = Call(request_id, asyncio.current_task())
        self._running[request_id] = call
        self._by_peer[peer] += 1
        try:
            yield call
        finally:
            del self._running[request_id]
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
            self._remember(request_id)

    def is_running(self, request_id: str) -> bool:
        """Whether it is being answered."""
        return request_id in self._running

    def was_aborted(self, request_id: str) -> bool:
        """Whether it has been, lately."""
        return self._ended.get(request_id, False)

    def has_ended(self, request_id: str) -> bool:
        """Whether it was answered lately and is no more."""
        return request_id in self._ended and request_id not in self._running

    def mark_aborted(self, request_id: str) -> None:
        """Somebody gave it up by name; naming it again changes nothing."""
        self._remember(request_id, aborted=True)

    def sweep(self) -> list[str]:
        """End the calls whose clients have not taken a message for too long; their ids. What fits into the windows of a
        connection counts as taken: some megabytes, whether a client reads or not."""
        oldest = self._clock() - self._limits.slow_reader_timeout_s
        slow = [
            call
            for call in self._running.values()
            if call.writing_since is not None and call.writing_since < oldest and not call.dropped
        ]
        for call in slow:
            call.dropped = True
            if call.task is not None:
                call.task.cancel()
        return [call.request_id for call in slow]

    def _remember(self, request_id: str, *, aborted: bool = False) -> None:
        self._ended[request_id] = aborted or self._ended.get(request_id, False)
        self._ended.move_to_end(request_id)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
