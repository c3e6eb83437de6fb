"""Who computes what in the next step: one loop over requests, each closing the gap between known and computed.

    step n      propose: rows, pages, slots    commit: the step is launched      finish: its tokens are read
    depth 0     propose 1  commit 1  finish 1  propose 2  commit 2  finish 2
    depth 1     propose 1  commit 1  propose 2  commit 2  finish 1  propose 3  commit 3  finish 2

`filling` says which rows a step has, `rows.judge` how far what was sampled reaches, `roster` who waits, runs or is
parked; here the three meet. A page returns to the pool when no launched, unread step holds a row of its request. Until
then a preempted or ended request is *parked*: its pages count as coming, and nobody is preempted for what they cover.

Knows counts of tokens, not their meaning, the model, or the device.

Shapes: B rows of a step.
"""

from __future__ import annotations

from itertools import compress, repeat

import numpy as np

from ep.errors import RequestError

from ..kv.hand_over import HandOver, Outcome
from ..requests.admission import Capacity, Policy, SchedulerConfig
from ..requests.ledger import Mask
from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from ..requests.request import FinishReason, Request, Status
from ..requests.roster import Roster
from ..requests.rows import Proposal, Row, Rows, SampledRow, Samples, Update, judge
from .filling import Drafter, StepFiller

__all__ = [
    "Drafter",
    "Policy",
    "Proposal",
    "Row",
    "Rows",
    "SampledRow",
    "Samples",
    "Scheduler",
    "SchedulerConfig",
    "Update",
]


class Scheduler:
    """The requests of one rank, from `add` to their last `Update`.

    num_generated   tokens that reached a request, since the start
    num_ended       requests that ended

    The requests' bookkeeping fields, the pool and the prefix cache are this object's to write. Calls come from one
    thread; `add` and `abort` may come between any two others, also between `propose` and `commit`. With a drafter a
    request decodes only when the host knows all of its tokens, so at depth 1 in every other step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        prefix: PrefixCache,
        *,
        drafter: Drafter | None = None,
        hand_over: HandOver | None = None,
    ) -> None:
        """hand_over: None, there are no connectors."""
        assert config.max_model_len is not None, "max_model_len must be settled before a scheduler is made"
        self.config = config
        self.capacity = Capacity(max_model_len=config.max_model_len, num_pages=pool.num_pages, page_size=pool.page_size)
        self._pool = pool
        self._page_size = pool.page_size
        self._prefix = prefix
        self._roster = Roster(pool, config.max_num_seqs)
        self.hand_over = hand_over or HandOver(pool, prefix)
        self._filler = StepFiller(config, self._roster, prefix, self.hand_over, drafter=drafter)
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self.num_generated = 0
        self.num_ended = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that will have more updates."""
        return len(self._requests)

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Of those requests."""
        return tuple(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are served in every step."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet, or were preempted."""
        roster = self._roster
        return len(roster.waiting) + len(roster.arriving) + len(roster.arrived)

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
        if self.hand_over.asks(request):
            self._roster.fetch(request)
        else:
            self._roster.enter(request)

    def abort(self, request_id: str) -> list[Update]:
        """End a request now, wherever it is; what is in flight for it is dropped. Nothing to do for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._end(request, FinishReason.ABORT)
        return [Update(request, (), None, FinishReason.ABORT)]

    def turn(self) -> list[Update]:
        """Before a step: latents that came are their requests', and what was fetched by others is free."""
        return [update for outcome in self.hand_over.turn() for update in self._take_loaded(outcome)]

    def propose(self) -> Proposal:
        """The rows of the next step, with pages and slots to compute them in; the same state gives the same rows.

        A proposal that is not committed costs nothing but the pages its requests would have taken later.
        """
        return self._filler.propose()

    def commit(self, proposal: Proposal, *, prefill_allowed: int | None = None) -> Rows:
        """Launch the proposal: its rows, with at most `prefill_allowed` tokens (None: all) in rows that prefill.

        Such rows are served in order, the last one cut, the others put off; rows that decode always stay. Rows of
        requests aborted since the proposal are left out.
        """
        rows, ledger = proposal.rows, self._roster.ledger
        is_running_B = ledger.is_running_S[rows.slot_B]
        if not is_running_B.all():
            rows = rows.take(is_running_B.nonzero()[0])
        if prefill_allowed is not None and prefill_allowed < proposal.prefill_tokens:
            rows = _cut(rows, prefill_allowed)
        ledger.launched(rows.slot_B, rows.num_tokens_B, rows.num_sampled_B)
        return rows

    def take_entered(self) -> list[Request]:
        """Requests that came to run with latents from elsewhere since the last call: `num_loaded` tokens of them."""
        return self._filler.take_entered()

    def finish(self, rows: Rows, samples: Samples) -> list[Update]:
        """Read the oldest launched step.

        New tokens reach their requests, computed pages the prefix cache; ended requests leave, and parked ones whose
        last launched step this was give their pages back. One update for each row that sampled and still counts.
        """
        self._roster.ledger.read(rows.slot_B, rows.num_sampled_B)
        goes_on_B = self._goes_on(rows, samples)
        updates = self._take_next_tokens(rows, samples, goes_on_B)
        num_others = 0
        for index in (~goes_on_B).nonzero()[0].tolist():
            row = rows[index]
            if row.request.status is Status.ENDED:
                continue
            if row.samples:
                place = np.count_nonzero(goes_on_B[:index]) + num_others
                updates.insert(place, self._take_tokens(row, samples.row(rows, index)))
                num_others += 1
            else:
                self._prefix.publish(row.request, num_tokens=row.end)
        self._roster.unpark()
        return updates

    def _goes_on(self, rows: Rows, samples: Samples) -> Mask:
        """Which rows sampled the next token of a running request and nothing else, so that `judge` need not be asked.

        It would say the same: no drafts, not the last place, and a token that ends nobody.
        """
        ledger, slot_B = self._roster.ledger, rows.slot_B
        goes_on_B = ledger.is_running_S[slot_B] & (rows.num_sampled_B == 1)
        goes_on_B &= ledger.num_host_S[slot_B] + 1 < ledger.max_len_S[slot_B]
        if not ledger.watched.keys().isdisjoint(samples.tokens):
            watched = [place for place, token in enumerate(samples.tokens) if token in ledger.watched]
            goes_on_B[np.arange(len(rows)).repeat(rows.num_sampled_B)[watched]] = False
        goes_on_B[list(samples.logprobs)] = False
        return goes_on_B

    def _take_next_tokens(self, rows: Rows, samples: Samples, goes_on_B: Mask) -> list[Update]:
        """One more token for each request that goes on."""
        requests = list(compress(rows.requests, goes_on_B.tolist()))
        tokens = list(map(samples.tokens.__getitem__, rows.first_sample_B[goes_on_B].tolist()))
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        self._roster.ledger.num_host_S[rows.slot_B[goes_on_B]] += 1
        self.num_generated += len(tokens)
        end_B = rows.end_B
        fills_page_B = goes_on_B & (end_B % self._page_size < rows.num_tokens_B)
        for index in fills_page_B.nonzero()[0].tolist():
            self._prefix.publish(rows.requests[index], num_tokens=int(end_B[index]))
        return list(map(Update, requests, zip(tokens, strict=True), repeat(None), repeat(None)))

    def _take_tokens(self, row: Row, sampled: SampledRow) -> Update:
        """Append what `judge` accepts; wrong drafts count as not computed, and their places are written again."""
        request = row.request
        verdict = judge(row, sampled.token_ids)
        new_tokens, reason = verdict.new_tokens, verdict.finish_reason
        request.tokens += new_tokens
        ledger = self._roster.ledger
        ledger.num_host_S[request.slot] += len(new_tokens)
        self.num_generated += len(new_tokens)
        num_computed = row.start + row.num_tokens
        if verdict.num_accepted < row.num_drafts:
            num_rejected = row.num_drafts - verdict.num_accepted
            num_computed -= num_rejected
            if request.status is Status.RUNNING:
                ledger.num_computed_S[request.slot] -= num_rejected
        if num_computed // self._page_size > request.num_published and reason is not FinishReason.ERROR:
            self._prefix.publish(request, num_tokens=num_computed)
        if reason is not None:
            self._end(request, reason)
        logprobs = None if sampled.logprobs is None else tuple(sampled.logprobs[: len(new_tokens)])
        return Update(request, new_tokens, logprobs, reason)

    def _take_loaded(self, outcome: Outcome) -> list[Update]:
        """The request goes on with what was loaded, or, where that failed, as the policy says.

        A load that the request did not ask for may fail as it likes: what it would have brought is computed.
        """
        request, wanted = outcome.request, outcome.request.kv is not None and outcome.request.kv.do_remote_prefill
        if outcome.error is None:
            self._roster.arrive(request, outcome.pages, num_loaded=outcome.num_tokens)
            self._prefix.publish(request, num_tokens=outcome.num_tokens)
            return []
        self.hand_over.failed(request)
        if self.hand_over.recompute or not wanted:
            self._roster.fetch_no_more(request)
            return []
        request.error = f"its latents could not be fetched: {outcome.error}"
        self._end(request, FinishReason.ERROR)
        return [Update(request, (), None, FinishReason.ERROR)]

    def _end(self, request: Request, reason: FinishReason) -> None:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.hand_over.lend(request)
        self.hand_over.leave(request)
        self._roster.end(request)
        request.finish_reason = reason
        self.num_ended += 1
        del self._requests[request.id]


def _cut(rows: Rows, allowed: int) -> Rows:
    """With at most `allowed` tokens in rows that prefill: in order, the last one cut, those behind it left out."""
    kept: list[Row] = []
    for row in rows.take(rows.is_prefill_B.nonzero()[0]):
        if allowed > 0:
            cut = row.num_tokens > allowed
            kept.append(Row(row.request, row.start, allowed, row.num_drafts, False) if cut else row)
        allowed -= row.num_tokens
    return Rows.joined((rows.take((~rows.is_prefill_B).nonzero()[0]), Rows.of(kept)))
