"""A stream: every token once and in order, chunks that grow while nobody reads, one end for every index."""

from __future__ import annotations

import asyncio

import pytest

from launch.front.front_client import Chunk
from launch.front.front_stream import OpenStream
from runtime.requests.outputs import News, TokenLogprob
from runtime.requests.request import FinishReason

pytestmark = pytest.mark.timeout(120)


def stream_of(n: int = 1, **more) -> tuple[OpenStream, list]:
    cancelled: list = []
    stream = OpenStream(
        "r", n=n, on_cancel=lambda _, index: cancelled.append(index), clock=more.pop("clock", lambda: 0.0), **more
    )
    return stream, cancelled


def news(*tokens: int, end: FinishReason | None = None, logprobs: bool = False) -> News:
    entries = tuple([TokenLogprob(token, -1.0, {}) for token in tokens]) if logprobs else None
    return News("0", tokens, entries, end, 5, 0)


def told(chunks: list[Chunk]) -> list[tuple]:
    return [(chunk.index, chunk.offset, chunk.token_ids, chunk.finish_reason) for chunk in chunks]


def read(stream: OpenStream) -> list[Chunk]:
    async def all_of_it() -> list[Chunk]:
        return [chunk async for chunk in stream]

    return asyncio.run(all_of_it())


def test_what_waits_for_the_reader_is_one_chunk():
    stream, _ = stream_of()
    for step in (news(1, logprobs=True), news(2, 3, logprobs=True), news(4, end=FinishReason.LENGTH, logprobs=True)):
        stream.push(0, step)
    [chunk] = read(stream)
    assert told([chunk]) == [(0, 0, (1, 2, 3, 4), "length")]
    assert [entry.token_id for entry in chunk.logprobs or ()] == [1, 2, 3, 4]
    assert chunk.num_cached_tokens == 5


def test_what_a_rank_says_of_the_prompt_is_in_the_first_chunk():
    async def run() -> list[Chunk]:
        stream, _ = stream_of()
        entry = TokenLogprob(3, -0.5, {})
        stream.push(0, News("0", (1,), None, None, 0, 0, (None, entry)))
        first = await anext(stream)
        stream.push(0, news(2, end=FinishReason.LENGTH))
        return [first, await anext(stream)]

    first, last = asyncio.run(run())
    assert first.prompt_logprobs == (None, TokenLogprob(3, -0.5, {}))
    assert last.prompt_logprobs is None


def test_a_reader_that_keeps_up_gets_a_chunk_a_step():
    async def run() -> list[Chunk]:
        stream, _ = stream_of()
        found = []
        for token in range(3):
            stream.push(0, news(token))
            found.append(await anext(stream))
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.push(0, news(9, end=FinishReason.STOP))
        found.append(await waiting)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return found

    assert told(asyncio.run(run())) == [
        (0, 0, (0,), None),
        (0, 1, (1,), None),
        (0, 2, (2,), None),
        (0, 3, (9,), "stop"),
    ]


def test_answers_are_told_apart_and_each_ends_once():
    stream, _ = stream_of(2)
    stream.push(1, news(7))
    stream.push(0, news(1, end=FinishReason.STOP))
    stream.push(0, news(2))
    stream.push(1, news(8, end=FinishReason.LENGTH))
    stream.finish("error", "too late")
    assert told(read(stream)) == [(1, 0, (7, 8), "length"), (0, 0, (1,), "stop")]


def test_nothing_follows_an_end_given_from_outside():
    stream, _ = stream_of()
    stream.push(0, news(1))
    stream.finish("abort", "asked to")
    stream.push(0, news(2, end=FinishReason.STOP))
    [chunk] = read(stream)
    assert told([chunk]) == [(0, 0, (1,), "abort")]
    assert chunk.error == "asked to"


def test_an_interval_holds_tokens_back_but_for_the_first_and_the_last():
    async def run() -> list[Chunk]:
        stream, _ = stream_of(interval=3)
        found = []
        for token in range(8):
            stream.push(0, news(token, end=FinishReason.LENGTH if token == 7 else None))
            if stream.oldest_wait is not None:
                found.append(await anext(stream))
        return found

    assert told(asyncio.run(run())) == [
        (0, 0, (0,), None),
        (0, 1, (1, 2, 3), None),
        (0, 4, (4, 5, 6), None),
        (0, 7, (7,), "length"),
    ]


def test_the_token_that_stopped_is_named_where_the_request_named_it():
    for asked, said in ((frozenset({4}), 4), (frozenset({5}), None)):
        stream, _ = stream_of(stop_token_ids=asked)
        stream.push(0, news(3, 4, end=FinishReason.STOP))
        assert [chunk.stop_reason for chunk in read(stream)] == [said]


def test_what_is_dropped_counts_in_the_offsets_and_the_end_stays():
    stream, _ = stream_of()
    stream.push(0, news(1, 2, 3))
    assert stream.num_waiting == 3
    stream.drop_waiting()
    stream.finish("abort", "slow reader")
    assert stream.num_waiting == 0
    assert told(read(stream)) == [(0, 3, (), "abort")]


def test_it_is_known_since_when_a_reader_is_awaited():
    now = [5.0]
    stream, _ = stream_of(clock=lambda: now[0])
    assert stream.oldest_wait is None
    stream.push(0, news(1))
    now[0] = 9.0
    stream.push(0, news(2))
    assert stream.oldest_wait == 5.0


def test_to_cancel_is_told_once_an_answer_and_never_after_its_end():
    stream, cancelled = stream_of(2)
    stream.cancel(1)
    stream.finish("abort", None, index=1)
    stream.cancel(1)
    stream.cancel()
    stream.finish("abort", None)
    stream.cancel()
    assert cancelled == [1, None]
