"""The front door's side of a group: what ranks are told, who is refused, and how everything ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ep import RequestError
from launch.front import front_group
from launch.front.front_client import Refused
from launch.front.front_config import FrontConfig
from launch.front.front_group import FrontGroup
from runtime.ranks.letters import AbortLetter, AdmitLetter, NoteLetter, WaveEndLetter, WaveLetter
from runtime.ranks.wire import (
    FailedLetter,
    FlushedLetter,
    FlushLetter,
    ProfileLetter,
    ReportLetter,
    StopProfileLetter,
    TraceLetter,
)
from runtime.requests.kv_log import KvLetter, KvStored
from runtime.requests.outputs import Note
from runtime.requests.sampling_params import SamplingParams
from tests.launch.front_rig import ScriptedLink, group_on
from tests.runtime.ranks.test_wire import STATS

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
pytestmark = pytest.mark.timeout(120)


def scripted(script: Callable[[FrontGroup, ScriptedLink], Awaitable[None]], *, ready: bool = True, **settings) -> None:
    """Run a script against a group whose ranks do only what it says."""

    async def run() -> None:
        link = ScriptedLink()
        group = group_on(link, **settings)
        if ready:
            link.be_ready()
        try:
            await script(group, link)
        finally:
            await group.close()
        assert link.closed

    asyncio.run(run())


def end_wave(link: ScriptedLink) -> None:
    for rank in range(link.size):
        link.hear(rank, WaveEndLetter(replace(STATS, rank=rank)))


def test_a_request_goes_to_a_rank_and_a_wave_starts_on_all():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        stream = group.admit("a", [5, 6], PARAMS)
        [(rank, letter)] = link.said(AdmitLetter)
        assert (letter.prompt, letter.params, letter.stop_ids) == ((5, 6), PARAMS, frozenset({1}))
        assert [rank for rank, _ in link.said(WaveLetter)] == [0, 1]
        group.admit("b", [7], PARAMS)
        assert len(link.said(WaveLetter)) == 2
        link.news(letter.id, 8, rank=rank)
        link.news(letter.id, 9, rank=rank, end="length", num_cached=1)
        chunk = await anext(stream)
        assert (chunk.token_ids, chunk.finish_reason, chunk.num_cached_tokens) == ((8, 9), "length", 1)

    scripted(script)


def test_a_wave_follows_the_last_one_while_somebody_is_in_the_house():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        group.admit("a", [5], PARAMS)
        end_wave(link)
        assert len(link.said(WaveLetter)) == 4
        link.news(link.said(AdmitLetter)[0][1].id, 8, end="stop")
        end_wave(link)
        assert len(link.said(WaveLetter)) == 4

    scripted(script)


def test_nobody_is_let_in_before_the_ranks_are_ready():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        assert group.health().state == "starting"
        with pytest.raises(Refused, match="not_ready"):
            group.admit("a", [5], PARAMS)
        info = asyncio.ensure_future(group.info())
        await asyncio.sleep(0)
        assert not info.done()
        link.be_ready()
        found = await info
        assert (found.vocab_size, found.pages_per_rank, found.block_size, found.ranks) == (160, (16, 16), 4, 2)
        assert group.health().state == "ready"

    scripted(script, ready=False)


def test_what_can_never_run_is_told_by_its_field():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        group.admit("a", [5], PARAMS)
        for field, asked in (
            ("request_id", {"request_id": "a"}),
            ("prompt[0]", {"prompt": [160]}),
            ("prompt", {"prompt": [1] * 64}),
            ("n", {"n": 0}),
            ("rank", {"rank": 2}),
            ("deadline_s", {"deadline_s": 0.0}),
            ("kv_transfer_params", {"kv_transfer_params": {"do_remote_decode": True}}),
        ):
            with pytest.raises(RequestError) as caught:
                group.admit(**({"request_id": "b", "prompt": [5], "params": PARAMS} | asked))
            assert caught.value.field == field
        assert len(link.said(AdmitLetter)) == 1

    scripted(script)


def test_what_does_not_fit_now_is_refused_early_and_leaves_no_trace():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        group.admit("a", [5, 6], PARAMS)
        for asked, reason in (({"prompt": [5] * 7}, "queue_tokens"), ({"n": 4}, "queue_requests")):
            with pytest.raises(Refused) as caught:
                group.admit(**({"request_id": "b", "prompt": [5], "params": PARAMS} | asked))
            assert caught.value.reason == reason
            assert caught.value.retry_after_s is not None
        with pytest.raises(Refused, match="queue_pages"):  # 32 pages are there, and 15 may be asked for
            group.admit("b", [5], SamplingParams(max_tokens=60))
        assert len(link.said(AdmitLetter)) == 1
        group.admit("b", [5], PARAMS)

    scripted(script, limits=FrontConfig(max_queued_tokens=8, max_open_requests=4, max_cache_demand=15 / 32))


def test_answers_of_one_prompt_have_one_seed_and_an_index_each():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        stream = group.admit("a", [5], PARAMS, n=3)
        letters = [letter for _, letter in link.said(AdmitLetter)]
        assert [letter.choice_index for letter in letters] == [0, 1, 2]
        assert len({letter.seed for letter in letters}) == 1
        stream.cancel(1)
        assert [letter.request_id for _, letter in link.said(AbortLetter)] == [letters[1].id]
        for letter in letters:
            link.news(letter.id, 9, end="length")
        ends = {chunk.index: chunk.finish_reason async for chunk in stream}
        assert ends == {0: "length", 1: "abort", 2: "length"}

    scripted(script)


def test_an_abort_ends_the_stream_at_once_and_its_id_is_free():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        stream = group.admit("a", [5], PARAMS)
        key = link.said(AdmitLetter)[0][1].id
        link.news(key, 8)
        assert group.abort("a", why="asked to")
        assert not group.abort("a", why="asked to")
        link.news(key, 9)
        [chunk] = [chunk async for chunk in stream]
        assert (chunk.token_ids, chunk.finish_reason, chunk.error) == ((8,), "abort", "asked to")
        group.admit("a", [5], PARAMS)
        first, second = [letter.id for _, letter in link.said(AdmitLetter)]
        assert first != second  # the rank may still hold the first

    scripted(script)


def test_a_deadline_ends_a_request():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        stream = group.admit("a", [5], PARAMS, deadline_s=0.02)
        [chunk] = [chunk async for chunk in stream]
        assert (chunk.finish_reason, chunk.error) == ("abort", "the deadline of 0.02 s is over")
        assert len(link.said(AbortLetter)) == 1

    scripted(script)


def test_a_reader_that_does_not_read_is_dropped_by_number_of_tokens_and_by_time():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        long = SamplingParams(temperature=0.0, max_tokens=40)
        by_number, by_time = group.admit("a", [5], long), group.admit("b", [6], long)
        first, second = [letter.id for _, letter in link.said(AdmitLetter)]
        for token in range(9):
            link.news(first, token)
        link.news(second, 7)
        await asyncio.sleep(0.06)
        [one], [two] = [chunk async for chunk in by_number], [chunk async for chunk in by_time]
        assert (one.finish_reason, one.error) == ("abort", "slow reader: 9 tokens wait for it")
        assert (two.finish_reason, two.error) == ("abort", "slow reader: it has not read for 0.03 s")
        assert len(link.said(AbortLetter)) == 2

    limits = FrontConfig(outbox_tokens=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_group, "SWEEP_S", 0.01)
        scripted(script, limits=limits, slow_reader_s=0.03)


def test_when_the_ranks_say_who_failed_every_stream_ends_with_that():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        stream = group.admit("a", [5], PARAMS, n=2)
        link.news(link.said(AdmitLetter)[0][1].id, 8)
        link.hear(None, FailedLetter(1, "its process has ended"))
        link.hear(None, FailedLetter(0, "a consequence"))
        chunks = [chunk async for chunk in stream]
        assert [chunk.finish_reason for chunk in chunks] == ["error", "error"]
        assert {chunk.error for chunk in chunks} == {"rank 1 failed: its process has ended"}
        assert (group.health().state, group.health().culprit) == ("failed", "rank 1 failed: its process has ended")
        await group.until_failed()
        for ask in (lambda: group.admit("b", [5], PARAMS), group.info):
            with pytest.raises(Refused, match="group_failed: rank 1 failed"):
                await ask()
        link.news(link.said(AdmitLetter)[1][1].id, 9)  # late, and unheard

    scripted(script)


def test_a_rank_that_is_lost_waits_for_the_verdict_of_the_others():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        link.lose("rank 0 failed: its process is gone")
        assert group.health().state == "ready"
        await asyncio.sleep(0.03)
        assert group.health().culprit == "rank 0 failed: its process is gone"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_group, "VERDICT_S", 0.01)
        scripted(script)


def test_a_drain_takes_nothing_new_and_waits_for_what_runs():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        group.admit("a", [5], PARAMS)
        draining = asyncio.ensure_future(group.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="draining"):
            group.admit("b", [5], PARAMS)
        assert group.health().state == "draining"
        link.news(link.said(AdmitLetter)[0][1].id, 8, end="length")
        await asyncio.sleep(0)
        assert not draining.done()  # the ranks are still in their wave
        end_wave(link)
        assert await draining is True

    scripted(script)


def test_a_drain_that_takes_too_long_aborts_what_is_left():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        stream = group.admit("a", [5], PARAMS)
        draining = asyncio.ensure_future(group.drain(0.01))
        [chunk] = [chunk async for chunk in stream]
        assert (chunk.finish_reason, "0.01 s" in (chunk.error or "")) == ("abort", True)
        link.news(link.said(AdmitLetter)[0][1].id, end="abort")
        end_wave(link)
        assert await draining is False

    scripted(script)


def test_a_flush_waits_for_every_rank_and_is_refused_while_somebody_is_in_the_house():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        flushing = asyncio.ensure_future(group.flush_cache())
        await asyncio.sleep(0)
        assert [rank for rank, _ in link.said(FlushLetter)] == [0, 1]
        link.hear(0, FlushedLetter())
        await asyncio.sleep(0)
        assert not flushing.done()
        link.hear(1, FlushedLetter())
        assert await flushing is True
        group.admit("a", [5], PARAMS)
        assert await group.flush_cache() is False

    scripted(script)


def test_a_trace_is_told_by_every_rank_and_there_is_one_at_a_time():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        with pytest.raises(ValueError, match="no trace"):
            await group.stop_profile()
        await group.profile(3, "t.json")
        with pytest.raises(ValueError, match="stop it first"):
            await group.profile(3, "t.json")
        assert [letter for _, letter in link.said(ProfileLetter)] == [ProfileLetter(3, "t.json")] * 2
        link.hear(0, TraceLetter("t.json", "3 steps"))
        stopping = asyncio.ensure_future(group.stop_profile())
        await asyncio.sleep(0)
        assert [rank for rank, _ in link.said(StopProfileLetter)] == [1]
        link.hear(1, TraceLetter("t.rank1.json", "2 steps"))
        assert await stopping == "rank 0: 3 steps (t.json)\nrank 1: 2 steps (t.rank1.json)"

    scripted(script)


def test_loads_say_how_each_rank_is():
    now = [100.0]

    async def run() -> None:
        link = ScriptedLink()
        group = group_on(link)
        group._reports._clock = lambda: now[0]
        link.be_ready()
        assert (group.loads(), group.health().last_step_age_s) == ((), None)
        group.admit("a", [5, 6, 7], PARAMS, rank=1)
        for steps, generated in ((2, 10), (4, 30)):
            stats = replace(STATS, rank=1, steps=steps, generated_tokens=generated)
            link.hear(1, ReportLetter(stats))
            now[0] += 2.0
        link.hear(0, NoteLetter(Note(text="slow", degraded=(1,))))
        [load] = group.loads()
        assert (load.rank, load.state, load.running, load.used_pages, load.waiting_tokens) == (1, "degraded", 1, 1, 3)
        assert (load.gen_tokens_per_s, load.prefix_hit_rate, load.beat_wait_s) == (10.0, 0.5, 0.5)
        assert load.last_step_age_s == 2.0
        assert group.stats()[0].generated_tokens == 30
        assert [letter.prompt for rank, letter in link.said(AdmitLetter) if rank == 0] == []
        group.admit("b", [5], PARAMS)
        assert link.said(AdmitLetter)[-1][0] == 0  # a degraded rank gets nothing new
        await group.close()

    asyncio.run(run())


def test_a_subscriber_is_told_what_is_there_and_then_what_changes():
    async def script(group: FrontGroup, link: ScriptedLink) -> None:
        link.hear(1, KvLetter(1, False, (), (KvStored(11, None, (1, 2)), KvStored(12, 11, (3, 4)))))
        link.hear(1, KvLetter(2, False, (11,), ()))
        feed = group.subscribe()
        first, second = await anext(feed), await anext(feed)
        assert (first.rank, first.sequence, first.cleared, first.stored) == (0, 0, True, ())
        assert (second.rank, second.sequence, second.cleared) == (1, 2, True)
        assert [(block.block_hash, block.parent_hash, block.token_ids) for block in second.stored] == [(12, 11, (3, 4))]
        link.hear(0, KvLetter(1, True, (), ()))
        assert (await anext(feed)).cleared
        for number in range(2, 400):  # it falls behind, and starts again from what is there
            link.hear(0, KvLetter(number, False, (), (KvStored(number, None, (number,)),)))
        events = [await anext(feed) for _ in range(len(feed._waiting))]
        restart = max(place for place, one in enumerate(events) if one.rank == 0 and one.cleared)
        known = {block.block_hash for one in events[restart:] if one.rank == 0 for block in one.stored}
        assert known == set(range(2, 400))
        assert len(events) <= 256

    scripted(script)
