"""Random lives of a front door over real ranks, and what must be true of each of them afterwards.

every request that was let in has one end for each of its answers, and nothing after it
its tokens are a beginning of what the engine says to that prompt, without a gap, without a token twice
nothing comes after an abort was acknowledged; every page is free, nobody waits, nothing is left in the house
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch.front.front_client import Chunk, Refused
from launch.front.front_config import FrontConfig
from launch.front.front_group import FrontGroup
from launch.front.front_stream import OpenStream
from runtime import Engine, SamplingParams
from tests.launch.front_rig import ThreadLink, group_on, small_model
from tests.runtime.mixes import Settings, engine_config

SETTINGS = Settings(ranks=2, async_depth=1, block_size=8, num_blocks=24, max_num_seqs=4, max_num_batched_tokens=32,
                    enable_prefix_caching=True)  # fmt: skip
MOST = 20
PROMPTS = [tuple(random.Random(n).randrange(2, 160) for _ in range(length)) for n, length in enumerate((1, 5, 17, 40))]
pytestmark = pytest.mark.timeout(120)


@dataclass
class Life:
    """One request: what was asked, and everything that was heard of it."""

    prompt: int
    n: int
    params: SamplingParams
    chunks: list[Chunk] = field(default_factory=list)
    aborted_at: int | None = None
    """Chunks that there were when an abort was acknowledged."""
    gone: bool = False
    """Its reader has left."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("history"))


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    """What the engine says to each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
    with Engine(engine_config(model, SETTINGS)) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, params)]


async def follow(life: Life, stream: OpenStream, rng: random.Random) -> None:
    """Read a stream as some client would: at once, with pauses, or only for a while."""
    pauses, leaves = rng.random() < 0.3, rng.random() < 0.2
    async for chunk in stream:
        life.chunks.append(chunk)
        if pauses and rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
        if leaves and rng.random() < 0.2:
            life.gone = True
            stream.cancel()
            return


async def ask(group: FrontGroup, rng: random.Random, name: str, lives: list[Life]) -> None:
    """One client: asks, reads, and perhaps takes it back."""
    params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, MOST), ignore_eos=True)
    life = Life(prompt=rng.randrange(len(PROMPTS)), n=rng.choice([1, 1, 1, 3]), params=params)
    deadline_s = rng.choice([None, None, None, 0.01, 0.05])
    try:
        stream = group.admit(name, PROMPTS[life.prompt], params, n=life.n, deadline_s=deadline_s)
    except Refused:
        return
    lives.append(life)
    reading = asyncio.ensure_future(follow(life, stream, rng))
    if rng.random() < 0.35:
        await asyncio.sleep(rng.random() * 0.05)
        if group.abort(name, why="taken back"):
            waiting = sum([len(entry.tokens) for entry in stream._entries if entry is not None])
            life.aborted_at = sum([len(chunk.token_ids) for chunk in life.chunks]) + waiting
            assert not group.abort(name, why="taken back")
    await reading


async def live(link: ThreadLink, rng: random.Random, requests: int) -> tuple[FrontGroup, list[Life]]:
    limits = FrontConfig(max_queued_tokens=300, max_cache_demand=3.0, stream_interval=rng.choice([1, 1, 3]))
    group = group_on(link, limits=limits)
    lives: list[Life] = []
    clients = []
    for number in range(requests):
        clients.append(asyncio.ensure_future(ask(group, rng, f"r{number}", lives)))
        await asyncio.sleep(rng.random() * 0.004)
    await asyncio.gather(*clients)
    until = time.monotonic() + 20.0
    while group._house is not None and not (group._house.is_empty and not group._in_wave) and time.monotonic() < until:
        await asyncio.sleep(0.002)
    return group, lives


def check(life: Life, truth: list[list[int]], *, failed: bool) -> None:
    heard = 0
    for index in range(life.n):
        mine = [chunk for chunk in life.chunks if chunk.index == index]
        tokens: list[int] = []
        for chunk in mine:
            assert chunk.offset == len(tokens)
            tokens += chunk.token_ids
        heard += len(tokens)
        expected = truth[life.prompt][: life.params.max_tokens]
        assert tokens == expected[: len(tokens)]
        ends = [chunk.finish_reason for chunk in mine if chunk.finish_reason is not None]
        if life.gone:
            assert not ends[1:]
            continue
        assert len(ends) == 1
        assert mine[-1].finish_reason == ends[0]
        assert ends[0] in (("length", "abort", "error") if failed else ("length", "abort"))
        assert ends[0] != "length" or tokens == expected
    assert life.aborted_at is None or life.gone or heard == life.aborted_at


def run_history(model: Path, truth: list[list[int]], seed: int, requests: int) -> set[str]:
    """One life of a front door; returns how requests ended."""
    rng = random.Random(seed)
    fail_at = rng.randint(10, 10 + requests) if seed % 4 == 3 else None

    async def run() -> list[Life]:
        link = ThreadLink(model, SETTINGS, fail_at=fail_at)
        group, lives = await live(link, rng, requests)
        failed = group.health().state == "failed"
        await group.close()
        if not failed:
            house = group._house
            assert house is not None
            assert (house._open, house._choices, house.queued_tokens) == ({}, {}, (0, 0))
            assert house._desk.used_pages == (0, 0)
            for worker in link.ranks.workers:
                assert worker.pool.num_free == worker.pool.num_pages
                assert worker.scheduler.num_unfinished == 0
        for life in lives:
            check(life, truth, failed=failed)
        return lives

    return {str(chunk.finish_reason) for life in asyncio.run(run()) for chunk in life.chunks}


def test_random_lives_keep_their_promises(model: Path, truth: list[list[int]]):
    ends: set[str] = set()
    for seed in range(4):
        ends |= run_history(model, truth, seed, requests=24)
    assert {"length", "abort", "error"} <= ends


def test_a_storm_of_aborts_leaves_nothing_behind(model: Path):
    asyncio.run(storm(model, requests=150))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_random_lives_keep_their_promises(model: Path, truth: list[list[int]]):
    for seed in range(100, 260):
        run_history(model, truth, seed, requests=60)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_storms_of_two_thousand_aborts_leave_memory_as_it_was(model: Path):
    asyncio.run(storm(model, requests=300))  # what is made once is made
    gc.collect()
    tracemalloc.start()
    try:
        asyncio.run(storm(model, requests=2000))
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        asyncio.run(storm(model, requests=2000))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < first + (1 << 18)
    finally:
        tracemalloc.stop()


async def storm(model: Path, *, requests: int) -> None:
    """70 of 100 requests are taken back at random moments, by either way; all pages come back."""
    rng = random.Random(11)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    link = ThreadLink(model, SETTINGS)
    group = group_on(link, limits=FrontConfig(max_cache_demand=1e6, max_queued_tokens=10**9))

    async def one(number: int) -> bool:
        stream = group.admit(str(number), PROMPTS[number % len(PROMPTS)], params)
        if rng.random() < 0.7:
            handle = asyncio.get_running_loop().call_later(
                rng.random() * 0.3, rng.choice([stream.cancel, lambda: group.abort(str(number), why="storm")])
            )
            ends = [chunk.finish_reason async for chunk in stream][-1]
            handle.cancel()
            return ends == "abort"
        assert [chunk.finish_reason async for chunk in stream][-1] == "length"
        return False

    aborted = await asyncio.gather(*[one(number) for number in range(requests)])
    assert sum(aborted) > requests * 0.3
    assert await group.drain(30.0)
    await group.close()
    assert group._house is not None
    assert group._house._desk.used_pages == (0, 0)
    for worker in link.ranks.workers:
        assert worker.pool.num_free == worker.pool.num_pages
        assert worker.scheduler.num_unfinished == worker.scheduler.num_parked == 0
