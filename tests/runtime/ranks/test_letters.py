"""Letters arrive as they were sent, whatever their length; bytes that are none are refused."""

import pytest

from runtime.loop.ranks import Abort, Admit, Wish
from runtime.ranks.letters import (
    FRAME_BYTES,
    LetterError,
    LetterReader,
    NewsLetter,
    WaveLetter,
    frames_of,
    item_of,
    letter_of,
)
from runtime.requests.outputs import News
from runtime.requests.request import FinishReason, Request
from runtime.requests.sampling_params import SamplingParams
from runtime.sampling.samples import TokenLogprob


def read(reader: LetterReader, letter):
    frames = frames_of(letter)
    assert all(len(frame) == FRAME_BYTES for frame in frames)
    *early, last = [reader.take(frame) for frame in frames]
    assert early == [None] * len(early)
    return last


def test_a_long_request_arrives_with_all_that_was_decided_for_it():
    params = SamplingParams(logit_bias={3: 1.5}, seed=2**64 - 1, stop_token_ids=(4,))
    request = Request(
        id="x", prompt=tuple(range(5000)), params=params, arrival=3, seed=2**64 - 1, stop_ids=frozenset({1, 4}),
        priority=-2, choice_index=1, cache_salt="s",
    )  # fmt: skip
    found = item_of(read(LetterReader.at_rank(), letter_of(Admit(request=request)))).request
    for name in ("id", "prompt", "params", "arrival", "seed", "stop_ids", "priority", "choice_index", "cache_salt"):
        assert getattr(found, name) == getattr(request, name), name


@pytest.mark.parametrize("item", [Abort(request_id="a"), Wish(pause=True), Wish(drain=True)])
def test_short_items_arrive_one_after_the_other(item):
    reader = LetterReader.at_rank()
    assert item_of(read(reader, letter_of(item))) == item
    assert read(reader, WaveLetter()) == WaveLetter()


def test_news_arrive_with_log_probabilities_and_reasons():
    entry = TokenLogprob(1, -0.5, {1: -0.5, 7: -2.0})
    news = News(
        request_id="a", token_ids=(1, 2), logprobs=(entry,), finish_reason=FinishReason.STOP, num_cached=3,
        num_preemptions=1,
    )  # fmt: skip
    assert read(LetterReader.at_front(), NewsLetter((news,))) == NewsLetter((news,))


@pytest.mark.parametrize(
    "frame", [b"\0" * FRAME_BYTES, b"\xff" * FRAME_BYTES, (5).to_bytes(4, "little") + b"hello".ljust(4092, b"\0")]
)
def test_bytes_that_are_no_letter_are_refused(frame: bytes):
    with pytest.raises(LetterError):
        LetterReader.at_front().take(frame)


def test_a_letter_of_a_rank_is_none_of_the_fronts():
    with pytest.raises(LetterError, match="no letter"):
        read(LetterReader.at_front(), WaveLetter())


def test_a_frame_out_of_turn_is_refused():
    request = Request(id="x", prompt=tuple(range(5000)), params=SamplingParams(), arrival=0)
    first, _, third, *_ = frames_of(letter_of(Admit(request=request)))
    reader = LetterReader.at_rank()
    reader.take(first)
    with pytest.raises(LetterError, match="were due"):
        reader.take(third)
