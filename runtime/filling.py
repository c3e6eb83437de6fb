"""Which rows the next step has: the one place where budget, slots and pages are handed out.

Order of service is strict: running requests first, newest tokens before prompts, then the head of the waiting line;
nobody overtakes the head. A request is admitted only with pages for all it knows, so that afterwards only decoding asks
for more. When a page is lacking, the last in order gives all of its pages back and is computed again later; the first
in order therefore always moves on, and every request ends as long as the pool can hold the largest one alone.

Knows what requests lack and hold; does not know what was launched or sampled (see `scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .admission import SchedulerConfig
from .prefix import PrefixCache
from .request import Request, Status
from .roster import Roster
from .rows import Proposal, Row

Drafter = Callable[[Request], Sequence[int]]
"""Guesses the tokens that follow `request.tokens`, any number of them; a wrong guess costs time and no token."""


class _Step:
    """The step being proposed: its rows, what is left of its budget, and whether a lack of pages closes the door."""

    __slots__ = ("budget", "closed", "prefill_tokens", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prefill_tokens = 0
        self.rows: list[Row] = []
        self.closed = False

    def proposal(self) -> Proposal:
        num_tokens = sum([row.num_tokens for row in self.rows])
        return Proposal(tuple(self.rows), num_tokens - self.prefill_tokens, self.prefill_tokens)


class StepFiller:
    """Fills steps from the lines of `roster`, moving requests between them as pages and slots allow."""

    def __init__(
        self, config: SchedulerConfig, roster: Roster, prefix: PrefixCache, *, drafter: Drafter | None = None
    ) -> None:
        self._config = config
        self._roster = roster
        self._pool = roster.pool
        self._prefix = prefix
        self._drafter = drafter

    def propose(self) -> Proposal:
        """The rows of the next step, with pages and slots to compute them in; the same state gives the same rows.

        A proposal that is not committed costs nothing but the pages its requests would have taken later.
        """
        step = _Step(self._config.max_num_batched_tokens)
        for request in self._propose_decodes(step):
            if step.budget and request.status is Status.RUNNING:
                self._propose_chunk(step, request)
        if not step.closed:
            self._admit(step)
        return step.proposal()

    def _propose_decodes(self, step: _Step) -> list[Request]:
        """Rows for running requests that lack one token only; returns those that lack more, in order of service."""
        running = tuple(self._roster.running)
        page_size, waits_for_drafts = self._pool.page_size, self._drafter is not None
        prompts: list[Request] = []
        for index, request in enumerate(running):
            num_computed = request.num_computed
            num_known = len(request.tokens) + request.num_pending
            if num_known - num_computed > 1:
                prompts.append(request)
            elif num_known > num_computed and step.budget and request.status is Status.RUNNING:
                if request.num_pending and (waits_for_drafts or num_known >= request.max_len):
                    continue  # the token in flight is its last, or drafts are to follow it
                if num_known > len(request.pages) * page_size and not self._grow(step, request):
                    continue
                num_drafts = 0
                if self._drafter is not None:
                    num_drafts = self._draft(request, spare=step.budget - (len(running) - index))
                step.rows.append(Row(request, num_computed, 1 + num_drafts, num_drafts, True))
                step.budget -= 1 + num_drafts
        return prompts

    def _draft(self, request: Request, *, spare: int) -> int:
        """Ask for drafts and keep those that fit: within `spare` tokens of budget, the length limit and free pages.

        `spare` is what is left when every running request has its next token; for drafts nobody is preempted.
        """
        assert self._drafter is not None
        num_known = len(request.tokens)
        limit = min(spare, request.max_len - num_known - 1)
        request.drafts = list(self._drafter(request)[:limit]) if limit > 0 else []
        room = len(request.pages) * self._pool.page_size - num_known
        if len(request.drafts) > room:
            pages = self._pool.allocate(self._pool.pages_for(len(request.drafts) - room)) or []
            request.pages += pages
            room += len(pages) * self._pool.page_size
        del request.drafts[room:]
        return len(request.drafts)

    def _propose_chunk(self, step: _Step, request: Request) -> None:
        """As much of the gap as budget and threshold allow; its pages are there since it was admitted."""
        gap = request.gap
        num_tokens = min(gap, step.budget)
        threshold = self._config.long_prefill_token_threshold
        if 0 < threshold < num_tokens:
            num_tokens = threshold
        row = Row(request, request.num_computed, num_tokens, 0, num_tokens == gap)
        step.rows.append(row)
        step.budget -= num_tokens
        step.prefill_tokens += num_tokens if row.is_prefill else 0

    def _admit(self, step: _Step) -> None:
        """Let requests in from the head of the waiting line, as long as budget, slots and pages last."""
        waiting = self._roster.waiting
        while waiting and step.budget and self._roster.num_free_slots:
            request = waiting[0]
            found = [] if request.in_flight else self._prefix.match(request, max_tokens=len(request.tokens) - 1)
            if request.in_flight or not self._fits(request, found):
                return
            self._take_pages(request, found)
            self._propose_chunk(step, request)

    def _fits(self, request: Request, found: Sequence[int]) -> bool:
        """Whether all its known tokens have pages, beside those of its cached prefix, `found`.

        A page for each running request stays free: without it the newcomer would be the next victim as soon as the
        others grow.
        """
        fresh = self._pool.pages_for(len(request.tokens)) - len(found)
        return fresh + self._pool.num_unheld(found) + len(self._roster.running) <= self._pool.num_free

    def _take_pages(self, request: Request, found: list[int]) -> None:
        """Admit the head of the line; what lies in `found` counts as computed."""
        self._prefix.take(request, found)
        fresh = self._pool.allocate(self._pool.pages_for(len(request.tokens)) - len(found))
        assert fresh is not None, f"request {request.id} was said to fit"
        self._roster.admit(found + fresh)
        request.num_published = len(found)
        request.num_computed = len(found) * self._pool.page_size
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed

    def _grow(self, step: _Step, request: Request) -> bool:
        """A page for the newest token, since the request's last one is full; False when it must wait for one.

        Nobody is admitted in a step in which somebody lacked a page.
        """
        if not self._pool.num_free:
            step.closed = True
            self._make_room(request)
        page = self._pool.allocate(1)
        request.pages += page or ()
        return page is not None

    def _make_room(self, needy: Request) -> None:
        """Preempt the last in order until a page is free or coming; never one that is before the needy."""
        while not self._pool.num_free and not self._roster.num_coming():
            victim = self._roster.running[-1]
            if victim is needy:
                return
            self._roster.preempt(victim)
