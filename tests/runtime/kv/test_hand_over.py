"""Requests whose latents come from elsewhere, on a scheduler alone: who waits, whose pages they are, who moves on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from runtime.kv.connector import Kept, KvLoadError, Landed, Lent, Want
from runtime.kv.hand_over import HandOver
from runtime.kv.kv_pages import PageBytes
from runtime.requests.kv_params import KvParams
from runtime.requests.pages import PagePool
from runtime.requests.prefix import PrefixCache
from runtime.requests.request import FinishReason, Request, Status
from runtime.requests.rows import SampledRow, Samples
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduling.heartbeat import HeartbeatState, Vote, decide
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig

SIZE = 4
FROM_ELSEWHERE = KvParams(do_remote_prefill=True, remote_request_id="r")


class Cache:
    def __init__(self, num_pages: int) -> None:
        self.pages = torch.zeros(2, num_pages, SIZE, 3, dtype=torch.float64)


class ScriptedLoad:
    """Lands or fails when the test says so; what it brings is all ones."""

    def __init__(self, want: Want, cache: PageBytes) -> None:
        self.want, self.num_tokens, self.cache = want, want.num_tokens, cache
        self.pages: Sequence[int] | None = None
        self.skip = 0
        self.end: str | None = None
        self.cancelled = False
        self.wrong = False

    def begin(self, *, skip: int, pages: Sequence[int]) -> None:
        self.skip, self.pages = skip, pages

    def poll(self) -> Landed | None:
        if self.end == "lands":
            brought = torch.ones(len(self.pages), 2, SIZE * 3, dtype=torch.float64).view(torch.uint8)
            other = PageBytes(Cache(len(self.pages)))
            other.put(range(len(self.pages)), brought)
            sums = other.sums(range(len(self.pages)), self.num_tokens - self.skip * SIZE).tolist()
            return Landed(sums=[total + self.wrong for total in sums], bytes_NLY=brought)
        if self.end is not None:
            raise KvLoadError(self.end)
        return None

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedLent:
    def __init__(self, kept: Kept) -> None:
        self.kept, self.params, self.over = kept, KvParams(do_remote_prefill=True, remote_request_id="r"), False

    def is_over(self) -> bool:
        return self.over


class Scripted:
    """A connector that has everything that is asked for by name."""

    def __init__(self, cache: PageBytes) -> None:
        self.cache, self.loads, self.lents, self.has_all = cache, [], [], False

    def find(self, want: Want) -> ScriptedLoad | None:
        if want.params is None and not self.has_all:
            return None
        self.loads.append(ScriptedLoad(want, self.cache))
        return self.loads[-1]

    def save(self, digest: bytes, page: int) -> None: ...

    def lend(self, kept: Kept) -> Lent | None:
        self.lents.append(ScriptedLent(kept))
        return self.lents[-1]

    def close(self) -> None: ...


class Rank:
    """A scheduler with a scripted connector, stepped by hand: every row that samples gets token 7."""

    def __init__(self, *, num_pages: int, slots: int = 4, recompute: bool = False, caching: bool = True) -> None:
        self.now = 0.0
        self.pool = PagePool(num_pages, SIZE)
        prefix = PrefixCache(self.pool, enabled=caching)
        self.cache = PageBytes(Cache(num_pages))
        self.connector = Scripted(self.cache)
        self.hand_over = HandOver(
            self.pool,
            prefix,
            connectors=[self.connector],
            cache=self.cache,
            timeout_s=10.0,
            recompute=recompute,
            clock=lambda: self.now,
        )
        config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=slots, max_model_len=64)
        self.scheduler = Scheduler(config, self.pool, prefix, hand_over=self.hand_over)
        self.ended: dict[str, FinishReason] = {}
        self.requests: dict[str, Request] = {}

    def add(self, name: str, length: int, *, max_tokens: int = 2, kv: KvParams | None = None, start: int = 0) -> None:
        request = Request(
            id=name,
            prompt=tuple(range(start, start + length)),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            arrival=len(self.requests),
            kv=kv,
        )
        self.requests[name] = request
        self.scheduler.add(request)

    def step(self) -> list[str]:
        """Names of the rows that the step had."""
        for update in self.scheduler.turn():
            self.ended[update.request.id] = update.finish_reason
        rows = self.scheduler.commit(self.scheduler.propose())
        samples = Samples.of([SampledRow((7,)) if row.samples else None for row in rows])
        for update in self.scheduler.finish(rows, samples):
            if update.finish_reason is not None:
                self.ended[update.request.id] = update.finish_reason
        return [row.request.id for row in rows]

    def held(self) -> int:
        return self.pool.num_pages - self.pool.num_free


def test_a_request_whose_latents_are_on_their_way_holds_no_slot_and_blocks_nobody():
    rank = Rank(num_pages=20)
    rank.add("late", 9, kv=FROM_ELSEWHERE)
    rank.add("prompt", 9, start=20)
    assert rank.step() == ["prompt"]
    assert (rank.requests["late"].status, rank.requests["late"].slot) == (Status.ARRIVING, None)
    rank.connector.loads[0].end = "lands"
    assert rank.step() == ["prompt", "late"]
    assert rank.requests["late"].num_cached == 8
    assert rank.requests["late"].num_output == 1


def test_it_is_never_blocked_behind_a_prompt_that_does_not_fit():
    rank = Rank(num_pages=6)
    rank.add("runs", 9, max_tokens=6)
    rank.step()
    rank.add("large", 20, start=20)
    rank.add("late", 5, kv=FROM_ELSEWHERE, start=50)
    rank.step()
    rank.connector.loads[0].end = "lands"
    assert rank.step() == ["runs", "late"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("how", ["fails", "wrong", "late"])
def test_what_does_not_come_or_is_wrong_ends_the_request_or_is_computed(recompute: bool, how: str):
    rank = Rank(num_pages=20, recompute=recompute)
    rank.add("x", 9, kv=FROM_ELSEWHERE)
    rank.step()
    [load] = rank.connector.loads
    if how == "late":
        rank.now = 10.5
    else:
        load.end, load.wrong = "lands" if how == "wrong" else "the other end is gone", how == "wrong"
    rows = rank.step()
    assert rows == (["x"] if recompute else [])
    if not recompute:
        assert rank.ended == {"x": FinishReason.ERROR}
        assert rank.requests["x"].error is not None
    else:
        while "x" not in rank.ended:
            rank.step()
        assert rank.ended["x"] is FinishReason.LENGTH
    assert rank.hand_over.stats.failures == 1
    if how == "late":
        assert load.cancelled
        assert rank.held() == 3  # somebody may still write to them
        load.end = "over"
        rank.step()
    assert rank.held() == 0
    assert len(rank.connector.loads) == 1  # it is not asked for again


def test_pages_of_an_aborted_request_come_back_when_nobody_writes_to_them_any_more():
    rank = Rank(num_pages=20)
    rank.add("x", 9, kv=FROM_ELSEWHERE)
    rank.step()
    rank.scheduler.abort("x")
    assert rank.scheduler.num_unfinished == 0
    rank.step()
    assert rank.held() == 3
    rank.connector.loads[0].end = "lands"
    rank.step()
    assert rank.held() == 0
    assert rank.pool.num_cached == 0  # nothing of it was published


def test_verified_pages_are_found_by_others_and_unverified_ones_are_not():
    rank = Rank(num_pages=20)
    rank.add("x", 9, kv=FROM_ELSEWHERE)
    rank.step()
    rank.add("same", 9)
    rank.step()
    assert rank.requests["same"].num_cached == 0
    rank.connector.loads[0].end = "lands"
    rank.step()
    rank.add("again", 9)
    rank.step()
    assert rank.requests["again"].num_cached == 8


def test_latents_that_are_in_the_cache_already_are_not_fetched():
    rank = Rank(num_pages=20)
    rank.add("first", 9)
    rank.step()
    rank.add("x", 9, kv=FROM_ELSEWHERE)
    assert rank.step() == ["first", "x"]
    [load] = rank.connector.loads
    assert load.cancelled
    assert load.pages is None


def test_only_what_is_missing_is_fetched():
    rank = Rank(num_pages=20)
    rank.add("first", 6)
    rank.step()
    rank.add("x", 11, kv=FROM_ELSEWHERE)
    rank.step()
    [load] = rank.connector.loads
    assert (load.skip, len(load.pages)) == (1, 2)
    load.end = "lands"
    while "x" not in rank.ended:
        rank.step()
    assert rank.requests["x"].num_cached == 10


def test_a_prompt_stays_until_its_lease_is_over_and_other_requests_wait_for_its_pages():
    rank = Rank(num_pages=4, caching=False)
    rank.add("x", 9, max_tokens=1, kv=KvParams(do_remote_decode=True))
    rank.step()
    assert rank.ended["x"] is FinishReason.LENGTH
    assert rank.requests["x"].kv_lent is not None
    [lent] = rank.connector.lents
    assert (lent.kept.num_tokens, len(lent.kept.pages), rank.held()) == (8, 2, 2)
    rank.add("y", 12)
    assert rank.step() == []
    assert rank.hand_over.awaits == 1
    lent.over = True
    assert rank.step() == ["y"]


def test_a_group_that_can_only_wait_for_latents_is_not_stalled():
    still = Vote(sequence=0, epoch=0, config_hash=0, unfinished=1)
    plan, _ = decide([still, still._replace(awaiting=1)], HeartbeatState())
    assert not plan.stalled
    plan, _ = decide([still, still], HeartbeatState())
    assert plan.stalled


def test_a_store_that_fails_is_not_asked_again_and_its_request_never_fails():
    rank = Rank(num_pages=20)
    rank.connector.has_all = True
    rank.add("x", 9)
    assert rank.step() == []
    rank.connector.loads[0].end = "a broken disk"
    assert rank.step() == ["x"]
    while "x" not in rank.ended:
        rank.step()
    assert rank.ended["x"] is FinishReason.LENGTH
    assert len(rank.connector.loads) == 1
    assert rank.held() == 0


def test_a_request_that_asks_about_its_prompt_is_computed():
    """What is fetched, nobody knows the logits of."""
    rank = Rank(num_pages=20)
    rank.connector.has_all = True
    request = Request(
        id="x", prompt=(1, 2, 3, 4, 5), params=SamplingParams(prompt_logprobs=1), arrival=0, kv=FROM_ELSEWHERE
    )
    assert not rank.hand_over.asks(request)
    assert rank.hand_over.offer(request, num_found=0) is None
    assert rank.connector.loads == []


def random_life(seed: int) -> dict[str, Any]:
    """Random requests, loads, leases, aborts and failures; everybody comes to an end, and no page is lost."""
    rng = random.Random(seed)
    rank = Rank(num_pages=rng.choice([6, 8, 14]), slots=rng.choice([1, 2, 4]), recompute=rng.random() < 0.5)
    names = [f"r{index}" for index in range(12)]
    for name in names:
        kinds = [None, None, FROM_ELSEWHERE, FROM_ELSEWHERE, KvParams(do_remote_decode=True)]
        rank.add(
            name,
            rng.randrange(1, 17),
            max_tokens=rng.randrange(1, 7),
            kv=rng.choice(kinds),
            start=rng.choice([0, 0, 30]),
        )
        for _ in range(rng.randrange(3)):
            rank.step()
        if rng.random() < 0.15:
            victim = rng.choice(names)
            for update in rank.scheduler.abort(victim):
                rank.ended[victim] = update.finish_reason
    for _ in range(2000):
        rank.now += 0.1
        for load in rank.connector.loads:
            if load.end is None and rng.random() < 0.1 and (load.pages is not None or load.cancelled):
                load.wrong = rng.random() < 0.2
                load.end = rng.choice(["lands", "lands", "gone"]) if load.pages is not None else "gone"
        for lent in rank.connector.lents:
            lent.over = lent.over or rng.random() < 0.1
        rank.step()
        if rank.scheduler.num_unfinished == 0 and not rank.hand_over.awaits:
            break
        running = [request for request in rank.requests.values() if request.status is Status.RUNNING]
        for request in running:
            assert request.num_computed <= len(request.pages) * SIZE
    else:
        raise AssertionError(f"seed {seed}: still unfinished: {rank.scheduler.describe()}")
    assert set(rank.ended) == set(names)
    assert rank.held() == 0
    return rank.ended


def test_random_lives_come_to_an_end_and_lose_no_page():
    reasons = {reason for seed in range(150) for reason in random_life(seed).values()}
    assert reasons == {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
