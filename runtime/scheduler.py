"""Who computes what in the next step: one loop over requests, each closing the gap between known and computed.

    step n      propose: rows, pages, slots    commit: the step is launched      finish: its tokens are read
    depth 0     propose 1  commit 1  finish 1  propose 2  commit 2  finish 2
    depth 1     propose 1  commit 1  propose 2  commit 2  finish 1  propose 3  commit 3  finish 2

`filling` says which rows a step has, `rows.judge` how far what was sampled reaches, `roster` who waits, runs or is
parked; here the three meet. A page returns to the pool when no launched, unread step holds a row of its request. Until
then a preempted or ended request is *parked*: its pages count as coming, and nobody is preempted for what they cover.

Plain Python: knows counts of tokens, not their meaning, the model, or the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from ep.errors import RequestError

from .admission import Capacity, Policy, SchedulerConfig
from .filling import Drafter, StepFiller
from .pages import PagePool
from .prefix import PrefixCache
from .request import FinishReason, Request, Status
from .roster import Roster
from .rows import Proposal, Row, SampledRow, Update, judge

__all__ = ["Drafter", "Policy", "Proposal", "Row", "SampledRow", "Scheduler", "SchedulerConfig", "Update"]


class Scheduler:
    """The requests of one rank, from `add` to their last `Update`.

    The requests' bookkeeping fields, the pool and the prefix cache are this object's to write. Calls come from one
    thread; `add` and `abort` may come between any two others, also between `propose` and `commit`. With a drafter a
    request decodes only when the host knows all of its tokens, so at depth 1 in every other step.
    """

    def __init__(
        self, config: SchedulerConfig, pool: PagePool, prefix: PrefixCache, *, drafter: Drafter | None = None
    ) -> None:
        assert config.max_model_len is not None, "max_model_len must be settled before a scheduler is made"
        self.config = config
        self.capacity = Capacity(max_model_len=config.max_model_len, num_pages=pool.num_pages, page_size=pool.page_size)
        self._pool = pool
        self._page_size = pool.page_size
        self._prefix = prefix
        self._roster = Roster(pool, config.max_num_seqs)
        self._filler = StepFiller(config, self._roster, prefix, drafter=drafter)
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that will have more updates."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are served in every step."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet, or were preempted."""
        return len(self._roster.waiting)

    @property
    def num_free_slots(self) -> int:
        """Requests that may still start to run."""
        return self._roster.num_free_slots

    @property
    def num_parked(self) -> int:
        """Preempted or ended requests that hold pages until their last launched step is read."""
        return len(self._roster.parked)

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its pages back, since the start."""
        return self._roster.num_preemptions

    def describe(self) -> str:
        """One line for an error message or a log."""
        return (
            f"{self.num_running} running, {self.num_waiting} waiting, {self.num_parked} parked; "
            f"{self._pool.num_free} of {self._pool.num_pages} pages and {self._roster.num_free_slots} of "
            f"{self.config.max_num_seqs} slots free"
        )

    def add(self, request: Request) -> None:
        """Queue a new request. `RequestError` when its id is in use, or when it could never end here (`Capacity`)."""
        if request.id in self._requests:
            raise RequestError(field="request_id", value=request.id, rule="must not be the id of an unfinished request")
        request.max_len = self.capacity.max_len(len(request.prompt), request.params.max_tokens)
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        request.turn = (priority, request.arrival, self._num_added)
        self._num_added += 1
        self._requests[request.id] = request
        self._roster.enter(request)

    def abort(self, request_id: str) -> list[Update]:
        """End a request now, wherever it is; what is in flight for it is dropped. Nothing to do for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._end(request, FinishReason.ABORT)
        return [Update(request, (), None, FinishReason.ABORT)]

    def propose(self) -> Proposal:
        """The rows of the next step, with pages and slots to compute them in; the same state gives the same rows.

        A proposal that is not committed costs nothing but the pages its requests would have taken later.
        """
        return self._filler.propose()

    def commit(self, proposal: Proposal, *, prefill_allowed: int | None = None) -> tuple[Row, ...]:
        """Launch the proposal: its rows, with at most `prefill_allowed` tokens (None: all) in rows that prefill.

        Such rows are served in order, the last one cut, the others put off; rows that decode always stay. Rows of
        requests aborted since the proposal are left out.
        """
        has_prompts = proposal.prefill_tokens > 0
        allowed = proposal.prefill_tokens if prefill_allowed is None else prefill_allowed
        rows: list[Row] = []
        for row in proposal.rows:
            request = row.request
            if request.status is not Status.RUNNING:
                continue
            if has_prompts and row.is_prefill:
                if allowed <= 0:
                    continue
                if row.num_tokens > allowed:
                    row = Row(request, row.start, allowed, row.num_drafts, False)
                allowed -= row.num_tokens
            request.num_computed += row.num_tokens
            request.num_pending += row.samples
            request.in_flight += 1
            rows.append(row)
        return tuple(rows)

    def finish(self, rows: Sequence[Row], sampled: Sequence[SampledRow | None]) -> list[Update]:
        """Read the oldest launched step: `sampled` has an entry a row, None for rows that do not sample.

        New tokens reach their requests, computed pages the prefix cache; ended requests leave, and parked ones whose
        last launched step this was give their pages back. One update for each row that sampled and still counts.
        """
        updates: list[Update] = []
        parked = self._roster.parked
        for row, samples in zip(rows, sampled, strict=True):
            request = row.request
            request.in_flight -= 1
            if samples is not None:
                request.num_pending -= 1
                if request.status is not Status.ENDED:
                    updates.append(self._take_tokens(row, samples))
            elif request.status is not Status.ENDED:
                assert not row.samples, f"nothing was sampled for request {request.id}"
                self._prefix.publish(request, num_tokens=row.end)
            if parked:
                self._roster.read(request)
        return updates

    def _take_tokens(self, row: Row, sampled: SampledRow) -> Update:
        """Append what `judge` accepts; wrong drafts count as not computed, and their places are written again."""
        request = row.request
        verdict = judge(row, sampled.token_ids)
        new_tokens, reason = verdict.new_tokens, verdict.finish_reason
        request.tokens += new_tokens
        num_computed = row.start + row.num_tokens
        if verdict.num_accepted < row.num_drafts:
            num_rejected = row.num_drafts - verdict.num_accepted
            num_computed -= num_rejected
            if request.status is Status.RUNNING:
                request.num_computed -= num_rejected
        if num_computed // self._page_size > request.num_published and reason is not FinishReason.ERROR:
            self._prefix.publish(request, num_tokens=num_computed)
        if reason is not None:
            self._end(request, reason)
        logprobs = None if sampled.logprobs is None else tuple(sampled.logprobs[: len(new_tokens)])
        return Update(request, new_tokens, logprobs, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._roster.end(request)
        request.finish_reason = reason
        del self._requests[request.id]
