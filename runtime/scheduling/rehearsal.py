"""A scheduler rehearsed without a model: every move is made on a pretend device, and held to the rules of a schedule.

The rules are said here in their plainest form - who holds a page, who may share one, where a row starts, who may be
preempted, who comes next - from nothing but requests, rows, pages, slots and updates. For tests and simulations.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from ..requests.request import FinishReason, Request, Status
from ..requests.rows import Proposal, Row, Rows, Samples
from .pretend import PretendDevice, PretendDrafter, PretendModel, Script
from .scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A step on the device, and what its rows may touch until it is read."""

    columns: Rows
    rows: tuple[Row, ...]
    samples: Samples
    pages: tuple[tuple[int, ...], ...]
    slots: tuple[int | None, ...]


class Rehearsal:
    """Drives one scheduler and holds it to the rules after every move; each broken rule is an AssertionError.

    `depth` steps may be launched and unread when the next is proposed. `drain` ends whatever is unfinished.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_pages: int,
        page_size: int,
        depth: int,
        accuracy: float | None = None,
        model: PretendModel | None = None,
    ) -> None:
        self.config = config
        self.depth = depth
        self.model = model if model is not None else PretendModel()
        self.pool = PagePool(num_pages, page_size)
        self.prefix = PrefixCache(self.pool, enabled=config.enable_prefix_caching)
        self.drafter = None if accuracy is None else PretendDrafter(accuracy=accuracy)
        self.scheduler = Scheduler(config, self.pool, self.prefix, drafter=self.drafter)
        self.device = PretendDevice(self.model, page_size=page_size)
        self.unread: deque[Launch] = deque()
        self.requests: list[Request] = []
        self.scripts: dict[Request, Script] = {}
        self.outputs: dict[Request, list[int]] = {}
        self.ends: dict[Request, FinishReason] = {}
        self.num_launched = 0
        self.trace: list[tuple[tuple[str, int, int, int, bool], ...]] = []
        self._next_start: dict[Request, int] = {}
        self._was_flushed = False

    # Moves

    def add(self, request: Request) -> None:
        """Queue a request; what `Scheduler.add` refuses is not remembered."""
        self.scheduler.add(request)
        assert self.config.max_model_len is not None
        script = self.model.script(request, self.config.max_model_len)
        self.scripts[request] = script
        self.outputs[request] = []
        self.requests.append(request)
        if self.drafter is not None:
            self.drafter.scripts[request] = script
        self.check()

    def abort(self, request: Request) -> None:
        """Take a request back, whether or not it has ended."""
        was_unfinished = request not in self.ends
        updates = self.scheduler.abort(request.id) if was_unfinished else []
        for update in updates:
            assert (update.request, update.new_tokens) == (request, ())
            self.ends[request] = FinishReason.ABORT
        assert bool(updates) == was_unfinished, f"request {request.id} was not there to abort"
        self.check()

    def launch(self, *, prefill_allowed: int | None = None, abort_between: Request | None = None) -> int:
        """Propose and commit one step; the number of tokens in it."""
        assert len(self.unread) <= self.depth, "the caller launches too far ahead"
        before = _Before.of(self)
        proposal = self.scheduler.propose()
        self._check_proposal(proposal, before)
        if abort_between is not None:
            self.abort(abort_between)
        columns = self.scheduler.commit(proposal, prefill_allowed=prefill_allowed)
        rows = tuple(columns)
        self._check_rows(rows, tuple(proposal.rows), prefill_allowed)
        self.unread.append(
            Launch(
                columns=columns,
                rows=rows,
                samples=Samples.of(self.device.run(rows)),
                pages=tuple(tuple(row.request.pages[: self.pool.pages_for(row.end)]) for row in rows),
                slots=tuple(row.request.slot for row in rows),
            )
        )
        self.num_launched += 1
        self.trace.append(
            tuple((row.request.id, row.start, row.num_tokens, row.num_drafts, row.samples) for row in rows)
        )
        self.check()
        return sum(row.num_tokens for row in rows)

    def read(self) -> None:
        """Finish the oldest launched step."""
        launch = self.unread.popleft()
        ended_before = set(self.ends)
        for update in self.scheduler.finish(launch.columns, launch.samples):
            request = update.request
            assert request not in self.ends, f"request {request.id} speaks after its end"
            self.outputs[request] += update.new_tokens
            assert update.logprobs == tuple((request.id, token) for token in update.new_tokens)
            if update.finish_reason is not None:
                self.ends[request] = update.finish_reason
            self._check_output(request)
        for row in launch.rows:
            self._note_read(row, was_live=row.request not in ended_before)
        self.check()
        self.requests = [r for r in self.requests if r not in self.ends or r.pages or r.in_flight]

    def flush(self) -> None:
        """Forget every cached prefix."""
        self.prefix.flush()
        self._was_flushed = True
        self.check()

    def step(self, *, prefill_allowed: int | None = None) -> bool:
        """One beat of an engine; False when nothing is left to do."""
        if not self.scheduler.num_unfinished and not self.unread:
            return False
        num_tokens = self.launch(prefill_allowed=prefill_allowed)
        assert num_tokens or len(self.unread) > 1 or prefill_allowed is not None, (
            f"nothing moves: {self.scheduler.describe()}"
        )
        while len(self.unread) > (self.depth if num_tokens else 0):
            self.read()
        return True

    def drain(self) -> None:
        """Step until all have ended, which they must within a bound that follows from their lengths."""
        while len(self.unread) > self.depth:
            self.read()
        bound = 20 + 6 * sum(request.max_len for request in self.requests)
        for _ in range(bound):
            if not self.step():
                break
        assert not self.scheduler.num_unfinished, f"unfinished after {bound} steps: {self.scheduler.describe()}"
        assert self.ends.keys() == self.scripts.keys(), "a request ended without saying so"
        assert self.pool.num_free == self.pool.num_pages, "pages are held although nothing runs"
        assert self.scheduler.num_parked == self.scheduler.num_running == self.scheduler.num_waiting == 0

    # Rules

    def check(self) -> None:
        """What must hold between any two moves: who holds which page, and who may share."""
        holders = Counter(page for request in self.requests for page in request.pages)
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == holders[page], f"page {page} is counted wrongly"
        assert self.pool.num_free == self.pool.num_pages - len(holders), "a page is neither held nor free"
        shared = {page for page, count in holders.items() if count > 1}
        if shared:
            self._check_shared(shared)
        slots = [request.slot for request in self.requests if request.slot is not None]
        assert len(slots) == len(set(slots)), "two requests have one slot"
        for launch in self.unread:
            for row, pages, slot in zip(launch.rows, launch.pages, launch.slots, strict=True):
                request = row.request
                assert tuple(request.pages[: len(pages)]) == pages, f"{request.id} lost pages that a step may touch"
                assert request.slot == slot, f"request {request.id} lost the slot that a step may touch"

    def _check_shared(self, shared: set[int]) -> None:
        """A page of several requests is full, published, at one place in all of them, and after equal tokens."""
        content: dict[int, tuple[object, ...]] = {}
        size = self.pool.page_size
        for request in self.requests:
            assert len(set(request.pages)) == len(request.pages), f"request {request.id} holds a page twice"
            for index, page in enumerate(request.pages):
                if page not in shared:
                    continue
                end = (index + 1) * size
                said = (index, request.cache_salt, tuple(request.tokens[:end]))
                assert self.pool.is_published(page) or self._was_flushed, f"page {page} is shared but not published"
                assert len(request.tokens) >= end, f"page {page} is shared but not full in {request.id}"
                assert content.setdefault(page, said) == said, f"page {page} is shared by {request.id} by mistake"

    def _check_proposal(self, proposal: Proposal, before: _Before) -> None:
        rows, config = tuple(proposal.rows), self.config
        assert len({row.request for row in rows}) == len(rows), "a request has two rows"
        assert sum(row.num_tokens for row in rows) <= config.max_num_batched_tokens, "the budget is exceeded"
        assert proposal.prefill_tokens == sum(row.num_tokens for row in rows if row.is_prefill)
        assert proposal.decode_tokens == sum(row.num_tokens for row in rows if not row.is_prefill)
        assert self.scheduler.num_running <= config.max_num_seqs
        for row in rows:
            self._check_proposed(row)
        self._check_order(before)
        if self.drafter is None:
            self._check_nobody_is_forgotten(rows)

    def _check_proposed(self, row: Row) -> None:
        request, threshold = row.request, self.config.long_prefill_token_threshold
        assert request.status is Status.RUNNING, f"request {request.id} has a row, but does not run"
        assert row.num_tokens >= 1
        assert row.samples == (row.end == request.num_known + row.num_drafts)
        assert row.end < request.max_len, f"request {request.id} computes what it can never need"
        assert not threshold or not row.is_prefill or row.num_tokens <= threshold
        assert len(request.pages) >= self.pool.pages_for(row.end), f"request {request.id} has no page for its row"

    def _check_order(self, before: _Before) -> None:
        """Victims are the last in order, and needed; nobody is admitted past the head of the line or in such a step."""
        running = {request for request in self.requests if request.status is Status.RUNNING}
        victims = {r for r in before.running if r.num_preemptions > before.num_preemptions[r]}
        admitted = running - before.running
        for victim in victims:
            self._next_start.pop(victim, None)
            assert all(self.turn(r) < self.turn(victim) for r in before.running - victims), "a wrong victim"
        assert not (victims and admitted), "somebody is admitted although somebody was preempted"
        if victims and self.drafter is None:
            assert before.demand > before.num_free + before.num_coming, "a request was preempted needlessly"
        waiting = [r for r in self.requests if r.status is Status.WAITING]
        for request in admitted:
            assert all(self.turn(request) < self.turn(r) for r in waiting), f"request {request.id} overtakes"
            assert request.num_computed % self.pool.page_size == 0
            self._next_start[request] = request.num_computed

    def _check_nobody_is_forgotten(self, proposed: tuple[Row, ...]) -> None:
        """With budget left and pages free, every running request that can move has a row."""
        served = {row.request for row in proposed}
        if sum(row.num_tokens for row in proposed) == self.config.max_num_batched_tokens:
            return
        for request in self.requests:
            if request.status is Status.RUNNING and request not in served and request.gap > 0:
                is_last = request.num_known >= request.max_len
                assert is_last or self._lacks(request) > 0, f"request {request.id} is forgotten"

    def _check_rows(self, rows: tuple[Row, ...], all_proposed: tuple[Row, ...], prefill_allowed: int | None) -> None:
        """What is launched starts where the last row of its request ended, and writes to pages of its own."""
        proposed = {row.request: row for row in all_proposed}
        if prefill_allowed is not None:
            # A cut row is one that the proposal calls prefill, also when one token of it is left.
            prefill = sum(row.num_tokens for row in rows if proposed[row.request].is_prefill)
            assert prefill <= prefill_allowed
        kept = {row.request for row in rows}
        for row in all_proposed:
            assert row.is_prefill or row.request in kept or row.request in self.ends, "a decoding row was left out"
        for row in rows:
            request, size = row.request, self.pool.page_size
            assert request not in self.ends, f"request {request.id} is launched after its end"
            assert row.start == self._next_start[request], f"request {request.id} leaves a hole or repeats itself"
            self._next_start[request] = row.end
            for page in request.pages[row.start // size : (row.end - 1) // size + 1]:
                assert self.pool.references(page) == 1, f"request {request.id} writes to shared page {page}"
                assert not self.pool.is_published(page), f"request {request.id} writes to published page {page}"

    def _note_read(self, row: Row, *, was_live: bool) -> None:
        """After drafts the next row starts at the last token known, whatever was guessed right."""
        if row.num_drafts and was_live and row.request in self._next_start:
            self._next_start[row.request] = len(row.request.prompt) + len(self.outputs[row.request]) - 1

    def _check_output(self, request: Request) -> None:
        output, script = tuple(self.outputs[request]), self.scripts[request]
        assert output == script.output[: len(output)], f"request {request.id} says something else"
        reason = self.ends.get(request)
        if reason is not None:
            assert (output, reason) == script, f"request {request.id} ends at the wrong place or for the wrong reason"

    def turn(self, request: Request) -> tuple[int, int]:
        """The order of service as the policy defines it."""
        return (request.priority if self.config.scheduling_policy == "priority" else 0, request.arrival)

    def _lacks(self, request: Request) -> int:
        return max(0, self.pool.pages_for(request.num_known) - len(request.pages))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What a proposal started from: who ran, pages free, pages that reading would free, pages decoding asks for."""

    running: set[Request]
    num_preemptions: dict[Request, int]
    num_free: int
    num_coming: int
    demand: int

    @classmethod
    def of(cls, rehearsal: Rehearsal) -> _Before:
        running = {r for r in rehearsal.requests if r.status is Status.RUNNING}
        parked = [set(r.pages) for r in rehearsal.requests if r.status is not Status.RUNNING]
        kept = {page for r in running for page in r.pages}
        return cls(
            running=running,
            num_preemptions={r: r.num_preemptions for r in running},
            num_free=rehearsal.pool.num_free,
            num_coming=len(set().union(*parked) - kept),
            demand=sum(rehearsal._lacks(r) for r in running),
        )
