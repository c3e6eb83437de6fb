"""Real schedulers of several ranks under the heartbeat, with a model that answers at once: who computes what when."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from runtime.requests.pages import PagePool
from runtime.requests.prefix import PrefixCache
from runtime.requests.request import FinishReason, Request
from runtime.requests.rows import Proposal, Rows, Samples
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduling.cadence import CadenceConfig, Interval, Reason
from runtime.scheduling.heartbeat import HeartbeatState, StepPlan, Vote, decide
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from runtime.scheduling.votes import PrefillWatch

BUDGET = 48


class Rank:
    """The part of a worker that takes part in the agreement. A page holds 4 tokens, a step takes 40 ms."""

    def __init__(self, *, depth: int, pages: int = 60, seqs: int = 4, prefix: bool = False) -> None:
        self.pool = PagePool(pages, 4)
        config = SchedulerConfig(
            max_num_batched_tokens=BUDGET, max_num_seqs=seqs, max_model_len=200, enable_prefix_caching=prefix
        )
        self.scheduler = Scheduler(config, self.pool, PrefixCache(self.pool, enabled=prefix))
        self.watch = PrefillWatch()
        self.depth = depth
        self.unread: deque[Rows] = deque()
        self.launched: list[Rows] = []
        self.ended: dict[str, FinishReason] = {}
        self.pause = 0

    def vote(self, sequence: int) -> tuple[Proposal, Vote]:
        proposal = self.scheduler.propose()
        spare = BUDGET - proposal.decode_tokens - proposal.prefill_tokens
        vote = Vote(
            sequence=sequence,
            epoch=0,
            config_hash=1,
            decode_tokens=proposal.decode_tokens,
            prefill_tokens=proposal.prefill_tokens,
            unfinished=self.scheduler.num_unfinished,
            in_flight=len(self.unread),
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_pages=self.pool.num_free,
            spare_tokens=spare,
            pause=self.pause,
            **self.watch.vote(proposal, spare_tokens=spare, now_ns=sequence * 40_000_000)._asdict(),
        )
        return proposal, vote

    def follow(self, plan: StepPlan, proposal: Proposal) -> None:
        if plan.bucket:
            rows = self.scheduler.commit(proposal, prefill_allowed=plan.prefill_allowed)
            self.watch.committed(rows)
            self.unread.append(rows)
            self.launched.append(rows)
        while len(self.unread) > (self.depth if plan.bucket else 0):
            rows = self.unread.popleft()
            for update in self.scheduler.finish(rows, Samples(tokens=[7] * int(rows.num_sampled_B.sum()))):
                if update.finish_reason is not None:
                    self.ended[update.request.id] = update.finish_reason


def request(name: str, prompt: Sequence[int], *, arrival: int, max_tokens: int) -> Request:
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=max_tokens), arrival=arrival)


def beat(ranks: list[Rank], state: HeartbeatState, sequence: int) -> tuple[StepPlan, HeartbeatState]:
    """One step of the group; every rank decides for itself."""
    proposals, votes = zip(*[rank.vote(sequence) for rank in ranks], strict=True)
    wire = [vote.row() for vote in votes]
    plans = [decide([Vote.from_row(row) for row in wire], state) for _ in ranks]
    assert all(plan == plans[0] for plan in plans)
    for rank, proposal in zip(ranks, proposals, strict=True):
        rank.follow(plans[0][0], proposal)
    return plans[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("interval", [1, 4, "auto"])
@pytest.mark.parametrize("num_ranks", [1, 5])
def test_every_request_ends_and_prompts_move_in_the_same_steps(depth: int, interval: Interval, num_ranks: int):
    rng = random.Random(f"{depth} {interval} {num_ranks}")
    ranks = [Rank(depth=depth, pages=rng.choice([12, 20, 60])) for _ in range(num_ranks)]
    arrivals = deque(sorted((rng.randrange(60), rng.randrange(num_ranks), n) for n in range(12 * num_ranks)))
    state = HeartbeatState.start(CadenceConfig(prefill_schedule_interval=interval, prefill_ready_tokens=40))
    put_off = 0
    for sequence in range(4000):
        while arrivals and arrivals[0][0] <= sequence:
            _, place, n = arrivals.popleft()
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 36))]
            ranks[place].scheduler.add(request(f"{n}", prompt, arrival=n, max_tokens=rng.randrange(1, 12)))
        marks = [len(rank.launched) for rank in ranks]
        plan, state = beat(ranks, state, sequence)
        assert not plan.stalled
        ran = [rank.launched[mark] for rank, mark in zip(ranks, marks, strict=True) if len(rank.launched) > mark]
        put_off = put_off + 1 if plan.reason is Reason.DEFERRED else 0
        assert put_off <= (3 if interval == 4 else 4 if interval == "auto" else 0)
        assert plan.reason is not Reason.DEFERRED or not any(row.is_prefill for rows in ran for row in rows)
        assert not plan.bucket or max(sum(row.num_tokens for row in rows) for rows in ran) <= plan.bucket
        if plan.last and not arrivals:
            break
    assert state.wave >= 1
    assert sum(len(rank.ended) for rank in ranks) == 12 * num_ranks
    assert all(rank.pool.num_free == rank.pool.num_pages for rank in ranks)
    assert (state.cadence.tally.deferred_steps > 0) == (interval != 1)


def test_a_request_that_lacks_one_token_only_is_never_put_off():
    """Its latents are there already, from the prefix cache here: as with those that arrive from another machine."""
    ranks = [Rank(depth=0, prefix=True), Rank(depth=0)]
    state = HeartbeatState.start(CadenceConfig(prefill_schedule_interval=50))
    ranks[0].scheduler.add(request("first", range(9), arrival=0, max_tokens=2))
    ranks[1].scheduler.add(request("long", range(30), arrival=0, max_tokens=40))
    sequence = 0
    while "first" not in ranks[0].ended:
        _, state = beat(ranks, state, sequence)
        sequence += 1
    ranks[0].scheduler.add(request("prompt", range(100, 130), arrival=2, max_tokens=2))
    ranks[0].scheduler.add(request("again", range(9), arrival=3, max_tokens=2))
    for _ in range(3):
        plan, state = beat(ranks, state, sequence)
        sequence += 1
        assert (plan.reason, plan.prefill_allowed) == (Reason.DEFERRED, 0)
    assert "again" in ranks[0].ended
    assert "prompt" not in ranks[0].ended


def test_a_pause_reads_what_is_in_flight_keeps_the_requests_and_goes_on_where_it_stopped():
    ranks = [Rank(depth=1), Rank(depth=1)]
    state = HeartbeatState()
    for place, rank in enumerate(ranks):
        rank.scheduler.add(request("a", range(20 + place), arrival=0, max_tokens=9))
    for sequence in range(4):
        plan, state = beat(ranks, state, sequence)
    assert [len(rank.unread) for rank in ranks] == [1, 1]
    ranks[1].pause = 1
    plans = []
    for sequence in range(4, 8):
        plan, state = beat(ranks, state, sequence)
        plans.append((plan.pause, plan.paused, plan.bucket))
    assert plans == [(True, False, 0), (True, True, 0), (True, True, 0), (True, True, 0)]
    assert [len(rank.launched) for rank in ranks] == [4, 4]
    assert [rank.scheduler.num_running for rank in ranks] == [1, 1]
    ranks[1].pause = 0
    for sequence in range(8, 30):
        plan, state = beat(ranks, state, sequence)
        if plan.last:
            break
    assert [rank.ended for rank in ranks] == [{"a": FinishReason.LENGTH}] * 2
