"""Where every request is - waiting, running, or parked - and the pages and slot it holds there.

    waiting --admit--> running --leave--> ended
     |   ^                | ^
     |   +-----preempt----+ |      in flight when it leaves: parked until its last launched step is read
     +--fetch--> arriving --> arrived      whose latents come from elsewhere; no slot until it runs

Parked requests keep pages and slot, since a launched step may still touch both. All lines are sorted by the requests'
`turn`. Knows how a request moves; not why: that is the scheduler's.

Shapes: R running requests.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from operator import attrgetter

import numpy as np

from .ledger import Column, Ledger
from .pages import PagePool
from .request import Request, Status
from .rows import FAILED_TOKEN

_turn = attrgetter("turn")


class Roster:
    """The lines of one rank. Read the lines; change them only through the methods."""

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self.pool = pool
        self.ledger = Ledger(num_slots, failed_token=FAILED_TOKEN)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.arriving: list[Request] = []
        self.arrived: list[Request] = []
        self.parked: dict[Request, None] = {}
        self.num_preemptions = 0
        self._free_slots = list(range(num_slots))
        self._slots_R: Column | None = None

    @property
    def num_free_slots(self) -> int:
        """Requests that may start to run."""
        return len(self._free_slots)

    @property
    def slots_R(self) -> Column:
        """Of those that run, in order; not to be written to. Made anew when somebody starts or ceases to run."""
        if self._slots_R is None:
            self._slots_R = np.array([request.slot for request in self.running], dtype=np.int64)
        return self._slots_R

    def enter(self, request: Request) -> None:
        """Into the waiting line, at its place in the order."""
        request.status = Status.WAITING
        insort(self.waiting, request, key=_turn)

    def fetch(self, request: Request) -> None:
        """A new one, into the line of those whose latents are on their way."""
        request.status = Status.ARRIVING
        insort(self.arriving, request, key=_turn)

    def fetch_head(self) -> None:
        """The head of the waiting line, likewise."""
        self.fetch(self.waiting.pop(0))

    def fetch_no_more(self, request: Request) -> None:
        """From there to the waiting line."""
        self._take_out(self.arriving, request)
        self.enter(request)

    def arrive(self, request: Request, pages: list[int], *, num_loaded: int) -> None:
        """The latents of its first tokens are in these pages, which are its own from now on."""
        self._take_out(self.arriving, request)
        request.status, request.pages, request.num_loaded = Status.ARRIVED, pages, num_loaded
        insort(self.arrived, request, key=_turn)

    def admit_arrived(self) -> Request:
        """The head of the arrived runs in the lowest free slot."""
        request = self.arrived.pop(0)
        return self._run(request, request.pages, num_computed=request.num_loaded)

    def drop_arrived(self) -> None:
        """The last of the arrived gives its pages back and waits as others do."""
        request = self.arrived[-1]
        self._leave(request)
        self.enter(request)
        request.num_loaded = 0

    def admit(self, pages: list[int], *, num_computed: int) -> Request:
        """The head of the waiting line runs, with these pages and the lowest free slot; so many tokens lie in them."""
        return self._run(self.waiting.pop(0), pages, num_computed=num_computed)

    def _run(self, request: Request, pages: list[int], *, num_computed: int) -> Request:
        request.status = Status.RUNNING
        request.pages = pages
        request.slot, request.ledger = heapq.heappop(self._free_slots), self.ledger
        self.ledger.open(
            request.slot,
            num_host=len(request.tokens),
            num_computed=num_computed,
            max_len=request.max_len,
            room=len(pages) * self.pool.page_size,
            asks=not request.is_plain,
            stop_ids=request.stop_ids,
        )
        insort(self.running, request, key=_turn)
        self._slots_R = None
        return request

    def add_pages(self, request: Request, pages: list[int]) -> None:
        """More for one that runs."""
        request.pages += pages
        self.ledger.room_S[request.slot] = len(request.pages) * self.pool.page_size

    def preempt(self, request: Request) -> None:
        """From running back to its place in the waiting line: tokens kept, nothing computed."""
        self.ledger.num_computed_S[request.slot] = 0
        self._leave(request)
        self.enter(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def end(self, request: Request) -> None:
        """Out of its line for good."""
        self._leave(request)
        request.status = Status.ENDED

    def unpark(self) -> None:
        """A step was read: pages and slots of parked requests that it was the last one of come back."""
        for request in [request for request in self.parked if not request.in_flight]:
            del self.parked[request]
            self._give_back(request)

    def num_coming(self) -> int:
        """Pages that get free by reading the launched steps, if nobody takes new ones."""
        return self.pool.num_held_only_by([request.pages for request in self.parked])

    def _leave(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._slots_R = None
            self.ledger.is_running_S[request.slot] = False
        self._take_out(self._line(request.status), request)
        if request.in_flight:
            self.parked[request] = None
        else:
            self._give_back(request)

    def _line(self, status: Status) -> list[Request]:
        lines = {
            Status.WAITING: self.waiting,
            Status.ARRIVING: self.arriving,
            Status.ARRIVED: self.arrived,
            Status.RUNNING: self.running,
        }
        return lines[status]

    def _take_out(self, line: list[Request], request: Request) -> None:
        index = bisect_left(line, request.turn, key=_turn)
        assert line[index] is request, f"request {request.id} is not where its status ({request.status}) says"
        del line[index]

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
        if request.slot is not None:
            self.ledger.close(request.slot, stop_ids=request.stop_ids)
            heapq.heappush(self._free_slots, request.slot)
            request.slot = request.ledger = None
