"""Where every request is - waiting, running, or parked - and the pages and slot it holds there.

    waiting --admit--> running --leave--> ended
       ^                  |
       +-----preempt------+        in flight when it leaves: parked until its last launched step is read

Parked requests keep pages and slot, since a launched step may still touch both. Both lines are sorted by the requests'
`turn`. Knows how a request moves; not why: that is the scheduler's.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from operator import attrgetter

from .pages import PagePool
from .request import Request, Status

_turn = attrgetter("turn")


class Roster:
    """The lines of one rank. Read `running` and `waiting`; change them only through the methods."""

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.parked: dict[Request, None] = {}
        self.num_preemptions = 0
        self._free_slots = list(range(num_slots))

    @property
    def num_free_slots(self) -> int:
        """Requests that may start to run."""
        return len(self._free_slots)

    def enter(self, request: Request) -> None:
        """Into the waiting line, at its place in the order."""
        request.status = Status.WAITING
        insort(self.waiting, request, key=_turn)

    def admit(self, pages: list[int]) -> Request:
        """The head of the waiting line runs, with these pages and the lowest free slot."""
        request = self.waiting.pop(0)
        request.status = Status.RUNNING
        request.pages = pages
        request.slot = heapq.heappop(self._free_slots)
        insort(self.running, request, key=_turn)
        return request

    def preempt(self, request: Request) -> None:
        """From running back to its place in the waiting line: tokens kept, nothing computed."""
        self._leave(request)
        self.enter(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1

    def end(self, request: Request) -> None:
        """Out of its line for good."""
        self._leave(request)
        request.status = Status.ENDED

    def read(self, request: Request) -> None:
        """A step that held a row of it was read: if it is parked and that was its last one, its pages come back."""
        if not request.in_flight and request in self.parked:
            del self.parked[request]
            self._give_back(request)

    def num_coming(self) -> int:
        """Pages that get free by reading the launched steps, if nobody takes new ones."""
        return self.pool.num_held_only_by([request.pages for request in self.parked])

    def _leave(self, request: Request) -> None:
        line = self.running if request.status is Status.RUNNING else self.waiting
        index = bisect_left(line, request.turn, key=_turn)
        assert line[index] is request, f"request {request.id} is not where its status ({request.status}) says"
        del line[index]
        if request.in_flight:
            self.parked[request] = None
        else:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
        if request.slot is not None:
            heapq.heappush(self._free_slots, request.slot)
            request.slot = None
