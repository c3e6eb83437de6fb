"""Thousands of steps of ranks that come and go: nobody diverges, nobody waits for ever, nothing is left behind.

What happens is drawn from a seed and happens in rank 0's thread at a given step, and only one rank runs at a time: the
same seed gives the same run, word by word. Items reach every rank some steps late, as letters would, so that a wish is
known on some ranks before it is known on others.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from runtime import CacheConfig, EngineConfig, FinishReason, Request, SamplingParams, SchedulerConfig
from runtime.loop.ranks import Abort, Admit, Item, Wish
from runtime.requests.outputs import News
from runtime.scheduling.cadence import CadenceConfig
from runtime.thread_ranks import ThreadRanks
from tests.runtime.mixes import SMALL_V3

RANKS = 8
TINY = SMALL_V3 | {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
MAX_LATE = 3
"""Steps that an item may be on its way."""


@dataclass(kw_only=True)
class Story:
    """What has happened so far, as somebody outside of the group can tell."""

    asked: dict[str, int] = field(default_factory=dict)  # rank, by request
    ended: dict[str, FinishReason] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    heard: list[tuple[int, str, tuple[int, ...], FinishReason | None]] = field(default_factory=list)
    num_pauses: int = 0
    num_waves: int = 0
    num_aborts: int = 0

    def hear(self, rank: int, news: News) -> None:
        name = news.request_id
        assert self.asked[name] == rank, f"rank {rank} speaks of {name}, which went to rank {self.asked[name]}"
        assert name not in self.ended, f"{name} had ended ({self.ended[name]}), and there is more: {news}"
        self.num_tokens[name] += len(news.token_ids)
        if news.finish_reason is not None:
            self.ended[name] = news.finish_reason
        self.heard.append((rank, name, news.token_ids, news.finish_reason))

    @property
    def open(self) -> list[str]:
        return [name for name in self.asked if name not in self.ended]


class Weather:
    """Rank 0's inbox, and through it everybody's: at each step something may be decided, and what is due arrives."""

    def __init__(self, ranks: ThreadRanks, seed: int) -> None:
        self.ranks = ranks
        self.random = random.Random(seed)
        self.story = Story()
        self.active = True
        self.wish = Wish()
        self._idle_votes = 0
        self._steps = 0
        self._on_their_way: list[deque[tuple[int, Item]]] = [deque() for _ in range(RANKS)]
        self._now = 0
        self._own = ranks.workers[0].inbox
        ranks.workers[0].inbox = self

    def take(self) -> Sequence[Item]:
        """See `runtime.loop.ranks.Inbox`. Rank 0 holds the baton, so nobody else looks at anything now."""
        self._now += 1
        self._check_progress()
        if self.active:
            self._decide()
        for rank in range(RANKS):
            self._deliver(rank, until=self._now)
        return self._own.take()

    def _check_progress(self) -> None:
        """After one vote without a launch everything is read, so that the next one launches or ends the wave."""
        steps = self.ranks.workers[0].counters.steps
        self._idle_votes = self._idle_votes + 1 if steps == self._steps else 0
        self._steps = steps
        assert self._idle_votes <= 1, f"{self._idle_votes} votes in a row launched nothing, and the wave goes on"

    def begin_wave(self) -> None:
        """No vote of this wave has been yet."""
        self._steps = -1

    def deliver_all(self) -> None:
        """Between waves: whatever is on its way arrives."""
        for rank in range(RANKS):
            self._deliver(rank, until=self._now + MAX_LATE)

    def _deliver(self, rank: int, *, until: int) -> None:
        way = self._on_their_way[rank]
        while way and way[0][0] <= until:
            self.ranks.send(rank, way.popleft()[1])

    def _decide(self) -> None:
        chance = self.random.random()
        if chance < 0.10:
            self.submit(self.random.choice((1, 1, 2, 9)))
        elif chance < 0.13 and self.story.asked:
            self.abort()
        elif chance < 0.15:
            self.say(Wish(pause=True))
        elif chance < 0.16:
            self.say(Wish(pause=True))
            self.say(Wish())  # taken back before anybody, or everybody, knows

    def submit(self, count: int) -> None:
        """Some for one rank, so that others are idle, or too many for the pages of one."""
        rank = self.random.randrange(RANKS)
        for _ in range(count):
            name = f"request-{len(self.story.asked)}"
            params = SamplingParams(
                temperature=self.random.choice((0.0, 0.0, 1.0)), max_tokens=self.random.randint(1, 24), ignore_eos=True
            )
            prompt = tuple(self.random.choices(range(2, 32), k=self.random.randint(1, 20)))
            self.story.asked[name] = rank
            self.story.num_tokens[name] = 0
            number = len(self.story.asked)
            self._send(rank, Admit(request=Request(id=name, prompt=prompt, params=params, arrival=number, seed=number)))

    def abort(self) -> None:
        """Of whoever it may be: one that runs, waits, is still on its way, has ended, or was aborted before."""
        name = self.random.choice(list(self.story.asked)[-12:])
        self.story.num_aborts += 1
        self._send(self.story.asked[name], Abort(request_id=name))

    def say(self, wish: Wish) -> None:
        """To all ranks, each of which hears it when it does."""
        self.wish = wish
        for rank in range(RANKS):
            self._send(rank, wish)

    def _send(self, rank: int, item: Item) -> None:
        way = self._on_their_way[rank]
        earliest = way[-1][0] if way else 0  # a link keeps the order
        way.append((max(earliest, self._now + self.random.randint(0, MAX_LATE)), item))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def open_ranks(model: Path, cadence: CadenceConfig) -> ThreadRanks:
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(model),
        ranks=RANKS,
        dtype="float32",
        load_format="dummy",
        cache=CacheConfig(block_size=4, num_blocks=16),  # a request has up to 11 pages: some are preempted
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4, max_model_len=48),
        cadence=cadence,
    )
    return ThreadRanks(config, drafter=None, on_plan=None, on_progress=None)


def live(model: Path, *, steps: int, seed: int, interval: int) -> Weather:
    """Run until `steps` were launched, then drain; checks between waves what must hold there."""
    ranks = open_ranks(model, CadenceConfig(prefill_schedule_interval=interval))
    weather = Weather(ranks, seed)
    while ranks.workers[0].counters.steps < steps:
        run_wave(weather)
        if weather.wish.pause:
            stay_paused(weather)
        elif not weather.story.open:
            weather.submit(weather.random.randint(1, 6))
    weather.active = False
    weather.say(Wish(drain=True))
    weather.deliver_all()
    while weather.story.open:
        run_wave(weather)
    check_drained(weather)
    return weather


def run_wave(weather: Weather) -> None:
    """One wave, and what must be so after every wave."""
    workers, story = weather.ranks.workers, weather.story
    weather.begin_wave()
    for rank, item in weather.ranks.wave():
        if isinstance(item, News):  # notes of slow ranks go by the clock
            story.hear(rank, item)
    story.num_waves += 1
    assert len({worker.sequence for worker in workers}) == 1, [worker.sequence for worker in workers]
    assert len({worker.counters.steps for worker in workers}) == 1, [worker.counters for worker in workers]
    assert len({repr(worker.state) for worker in workers}) == 1, [worker.state for worker in workers]
    assert len({repr(worker.stragglers) for worker in workers}) == 1, [worker.stragglers for worker in workers]
    if not any(worker.wish.pause for worker in workers):
        left = [worker.scheduler.describe() for worker in workers if worker.scheduler.num_unfinished]
        assert not left, f"the wave ended with work left: {left}"
    check_nothing_in_flight(weather)


def check_nothing_in_flight(weather: Weather) -> None:
    for worker in weather.ranks.workers:
        where = f"rank {worker.transport.rank}: {worker.scheduler.describe()}"
        assert not worker.in_flight, where
        assert worker.scheduler.num_parked == 0, where
        for request in worker.scheduler._requests.values():
            assert (request.in_flight, request.num_pending) == (0, 0), f"{request.id} on {where}"


def stay_paused(weather: Weather) -> None:
    """A wave in a pause launches nothing, whatever comes; then everybody goes on, or a pause that is repeated stays."""
    story = weather.story
    story.num_pauses += 1
    weather.active = False
    weather.deliver_all()
    weather.say(Wish(pause=True))
    weather.submit(1)
    weather.abort()
    weather.deliver_all()
    steps = weather.ranks.workers[0].counters.steps
    tokens = sum(story.num_tokens.values())
    for _ in range(2):
        run_wave(weather)
    assert weather.ranks.workers[0].counters.steps == steps, "a paused group launched a step"
    assert sum(story.num_tokens.values()) == tokens, "a token came out of a paused group"
    weather.say(Wish())
    if weather.random.random() < 0.5:
        weather.deliver_all()  # else the wave begins with the news still on its way to some
    weather.active = True


def check_drained(weather: Weather) -> None:
    """Every request has ended once (see `Story.hear`), as it was asked to, and every page is free."""
    story = weather.story
    assert set(story.ended) == set(story.asked)
    assert set(story.ended.values()) <= {FinishReason.LENGTH, FinishReason.ABORT}, story.ended
    for stats in weather.ranks.stats():
        assert (stats.free_pages, stats.running, stats.waiting) == (stats.num_pages, 0, 0), stats
    assert [worker.wish for worker in weather.ranks.workers] == [Wish(drain=True)] * RANKS


def check_was_a_mix(weather: Weather) -> None:
    """The run had everything in it that it is there for."""
    stats, story = weather.ranks.stats(), weather.story
    share_idle = sum(each.idle_steps for each in stats) / sum(each.steps for each in stats)
    assert 0.1 < share_idle < 0.9, share_idle
    assert story.num_pauses >= 5, story.num_pauses
    assert list(story.ended.values()).count(FinishReason.ABORT) >= 10
    assert sum(each.preemptions for each in stats) >= 1
    assert story.num_waves > 2 * story.num_pauses + 1


@pytest.mark.slow
def test_hundreds_of_steps_of_busy_idle_paused_and_drained_ranks_stay_in_step(tiny: Path):
    check_was_a_mix(live(tiny, steps=400, seed=5, interval=1))


def test_the_same_seed_gives_the_same_run(tiny: Path):
    first, second = (live(tiny, steps=60, seed=2, interval=3) for _ in range(2))
    assert first.story.heard == second.story.heard


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "interval"), [(3, 1), (4, 4)])
def test_ten_thousand_steps_stay_in_step(tiny: Path, seed: int, interval: int):
    check_was_a_mix(live(tiny, steps=10_000, seed=seed, interval=interval))
