"""Which rows the next step has: the one place where budget, slots and pages are handed out.

Order of service is strict: running requests first, newest tokens before prompts, then the head of the waiting line;
nobody overtakes the head. A request is admitted only with pages for all it knows, so that afterwards only decoding asks
for more. When a page is lacking, the last in order gives all of its pages back and is computed again later; the first
in order therefore always moves on, and every request ends as long as the pool can hold the largest one alone.

Requests whose latents come from elsewhere stand in lines of their own, which no prompt blocks: pages are given to a
load, without a slot; when it has landed, a slot is all that the request needs. Those that wait for a slot are the first
to give their pages back, and a load is over in bounded time, so that they never keep the others from moving on.

Knows what requests lack and hold; does not know what was launched or sampled (see `scheduler`).

Shapes: R running requests in order of service, B rows of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from ..kv.connector import Load
from ..kv.hand_over import HandOver
from ..requests.admission import SchedulerConfig
from ..requests.ledger import Column, Mask
from ..requests.prefix import PrefixCache
from ..requests.request import Request, Status
from ..requests.roster import Roster
from ..requests.rows import Proposal, Row, Rows

Drafter = Callable[[Request], Sequence[int]]
"""Guesses the tokens that follow `request.tokens`, any number of them; a wrong guess costs time and no token."""


class _Step:
    """The step being proposed: its rows, what is left of its budget, and whether a lack of pages closes the door."""

    __slots__ = ("budget", "chunks", "closed", "decodes", "prefill_tokens")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prefill_tokens = 0
        self.decodes = Rows.of(())
        self.chunks: list[Row] = []
        self.closed = False

    def proposal(self) -> Proposal:
        rows = Rows.joined((self.decodes, Rows.of(self.chunks))) if self.chunks else self.decodes
        return Proposal(rows, rows.num_tokens - self.prefill_tokens, self.prefill_tokens)


class StepFiller:
    """Fills steps from the lines of `roster`, moving requests between them as pages and slots allow."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        prefix: PrefixCache,
        hand_over: HandOver,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        self._config = config
        self._roster = roster
        self._pool = roster.pool
        self._prefix = prefix
        self._hand_over = hand_over
        self._drafter = drafter
        self._entered: list[Request] = []

    def take_entered(self) -> list[Request]:
        """Requests that came to run with a page begun, since the last call; those that still do."""
        entered, self._entered = self._entered, []
        return [request for request in entered if request.status is Status.RUNNING]

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
        running, slots_R, ledger = tuple(self._roster.running), self._roster.slots_R, self._roster.ledger
        if not running:
            return []
        num_pending_R, num_computed_R = ledger.num_pending_S[slots_R], ledger.num_computed_S[slots_R]
        num_known_R = ledger.num_host_S[slots_R] + num_pending_R
        gap_R = num_known_R - num_computed_R
        if self._drafter is None:
            goes_on_R = (num_pending_R == 0) | (num_known_R < ledger.max_len_S[slots_R])  # else its last is in flight
        else:
            goes_on_R = num_pending_R == 0  # else drafts are to follow the token in flight
        served_R = goes_on_R & (gap_R == 1)
        lacking_R = served_R & (num_known_R > ledger.room_S[slots_R])
        if lacking_R.any():
            self._grow(step, running, served_R, lacking_R.nonzero()[0].tolist())
            served_R &= ledger.is_running_S[slots_R]
        served_R[served_R.cumsum() > step.budget] = False
        num_tokens_R = served_R.astype(np.int64)
        if self._drafter is not None:
            self._draft(step, running, num_tokens_R)
        slot_B, num_tokens_B = slots_R[served_R], num_tokens_R[served_R]
        step.decodes = Rows(
            requests=list(compress(running, served_R.tolist())),
            slot_B=slot_B,
            start_B=num_computed_R[served_R],
            num_tokens_B=num_tokens_B,
            num_sampled_B=num_tokens_B,
            asks_B=ledger.asks_S[slot_B],
        )
        step.budget -= step.decodes.num_tokens
        return [running[index] for index in (gap_R > 1).nonzero()[0].tolist()]

    def _grow(self, step: _Step, running: Sequence[Request], served_R: Mask, lacking: Sequence[int]) -> None:
        """A page for each newest token whose request's last page is full; no row for those that must wait for one.

        Nobody is admitted in a step in which somebody lacked a page.
        """
        for index in lacking:
            request = running[index]
            if request.status is not Status.RUNNING or np.count_nonzero(served_R[:index]) >= step.budget:
                return  # preempted, as are all behind it; or their tokens do not fit
            if not self._pool.num_free:
                step.closed = True
                self._make_room(request)
            page = self._pool.allocate(1)
            if page is None:
                served_R[index] = False
            else:
                self._roster.add_pages(request, page)

    def _draft(self, step: _Step, running: Sequence[Request], num_tokens_R: Column) -> None:
        """Ask for drafts and add those that fit: within the budget, the length limit and free pages.

        They get what is left when every running request has its next token; for drafts nobody is preempted.
        """
        assert self._drafter is not None
        spare = step.budget - len(running)
        for index in num_tokens_R.nonzero()[0].tolist():
            request = running[index]
            num_known = len(request.tokens)
            limit = min(spare, request.max_len - num_known - 1)
            request.drafts = list(self._drafter(request)[:limit]) if limit > 0 else []
            room = len(request.pages) * self._pool.page_size - num_known
            if len(request.drafts) > room:
                self._roster.add_pages(
                    request, self._pool.allocate(self._pool.pages_for(len(request.drafts) - room)) or []
                )
                room = len(request.pages) * self._pool.page_size - num_known
            del request.drafts[room:]
            num_tokens_R[index] += len(request.drafts)
            spare -= len(request.drafts)

    def _propose_chunk(self, step: _Step, request: Request) -> None:
        """As much of the gap as budget and threshold allow; its pages are there since it was admitted."""
        gap = request.gap
        num_tokens = min(gap, step.budget)
        threshold = self._config.long_prefill_token_threshold
        if 0 < threshold < num_tokens:
            num_tokens = threshold
        row = Row(request, request.num_computed, num_tokens, 0, num_tokens == gap)
        step.chunks.append(row)
        step.budget -= num_tokens
        step.prefill_tokens += num_tokens if row.is_prefill else 0

    def _admit(self, step: _Step) -> None:
        """Let requests in from the head of the waiting line, as long as budget, slots and pages last.

        Before them those whose latents have arrived, which need a slot only.
        """
        self._give_pages()
        while self._roster.arrived and step.budget and self._roster.num_free_slots:
            request = self._roster.admit_arrived()
            self._entered.append(request)
            self._note_admission(request)
            self._propose_chunk(step, request)
        waiting = self._roster.waiting
        while waiting and step.budget and self._roster.num_free_slots:
            request = waiting[0]
            found = self._cached(request)
            if request.in_flight or not self._fits(request, found):
                return
            load = self._hand_over.offer(request, num_found=len(found) * self._pool.page_size)
            if load is not None:
                self._roster.fetch_head()
                self._begin(request, load, found)
                continue
            self._take_pages(request, found)
            self._propose_chunk(step, request)

    def _cached(self, request: Request) -> list[int]:
        """Pages of its beginning that are computed already; of none that must wait, or that is asked about its prompt:
        what is found in the cache, nobody knows the logits of."""
        if request.in_flight or request.prompt_logprobs is not None:
            return []
        return self._prefix.match(request, max_tokens=len(request.tokens) - 1)

    def _give_pages(self) -> None:
        """To requests that asked for their latents, in their order, as long as there are enough."""
        for request, load in self._hand_over.asking():
            found = self._cached(request)
            if load.num_tokens <= len(found) * self._pool.page_size:
                self._hand_over.leave(request)
                self._roster.fetch_no_more(request)
            elif self._fits(request, found):
                self._begin(request, load, found)
            else:
                return

    def _begin(self, request: Request, load: Load, found: list[int]) -> None:
        """Pages for all it knows; the load fills those that are not in `found`."""
        pages = self._hold_pages(request, found)
        self._hand_over.begin(request, load, pages=pages, num_found=len(found))

    def _fits(self, request: Request, found: Sequence[int]) -> bool:
        """Whether all its known tokens have pages, beside those of its cached prefix, `found`.

        A page for each running request stays free: without it the newcomer would be the next victim as soon as the
        others grow.
        """
        fresh = self._pool.pages_for(len(request.tokens)) - len(found)
        growing = len(self._roster.running) + len(self._roster.arrived)
        return fresh + self._pool.num_unheld(found) + growing <= self._pool.num_free

    def _take_pages(self, request: Request, found: list[int]) -> None:
        """Admit the head of the line; what lies in `found` counts as computed."""
        pages = self._hold_pages(request, found)
        self._roster.admit(pages, num_computed=self._prefix.num_computed(request, found))
        self._note_admission(request)

    def _hold_pages(self, request: Request, found: list[int]) -> list[int]:
        """Those of its cached prefix, and fresh ones for the rest of what it knows."""
        self._prefix.take(request, found)
        fresh = self._pool.allocate(self._pool.pages_for(len(request.tokens)) - len(found))
        assert fresh is not None, f"request {request.id} was said to fit"
        request.num_published = len(found)
        return found + fresh

    def _note_admission(self, request: Request) -> None:
        self._hand_over.leave(request)
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed

    def _make_room(self, needy: Request) -> None:
        """Preempt the last in order until a page is free or coming; never one that is before the needy."""
        while not self._pool.num_free and not self._roster.num_coming():
            if self._roster.arrived:
                self._roster.drop_arrived()
                continue
            victim = self._roster.running[-1]
            if victim is needy:
                return
            self._roster.preempt(victim)
