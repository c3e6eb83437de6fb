from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.command.text import TextCodec
from launch.front.detokenizer import StopWatch

TINY = Path(__file__).resolve().parents[3] / "profiles" / "models" / "tiny-v3"
CODEC = TextCodec.open(TINY)
assert CODEC is not None


def first_stop(ids: list[int], stops: list[str], *, prompt: list[int] = []) -> tuple[int, str] | None:  # noqa: B006
    """What the watch is held against: decode the whole output anew after every token."""
    before = CODEC.decode(prompt)
    for end in range(1, len(ids) + 1):
        text = CODEC.decode([*prompt, *ids[:end]])[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            return end, min(found)[2]
    return None


def watched(ids: list[int], stops: list[str], cuts: list[int], *, prompt: list[int] = []) -> tuple[int, str] | None:  # noqa: B006
    """The same by the watch, fed in pieces of these sizes."""
    watch, begin = StopWatch(CODEC, prompt, stops), 0
    for size in [*cuts, len(ids)]:
        if (stopped := watch.push(ids[begin : begin + size])) is not None:
            return begin + stopped.num_tokens, stopped.stop
        begin += size
    return None


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
def test_a_stop_string_is_found_at_its_last_token_whatever_the_steps_were(cut):
    ids = CODEC.encode("for item in items:\n    print(item)\n\ndef next_one():\n    return 1")
    for stop in ("item", "\n\n", "(item", "tems:\n  ", "return 1", "n"):
        wanted = first_stop(ids, [stop])
        assert wanted is not None, stop
        assert watched(ids, [stop], [cut] * len(ids)) == wanted


def test_a_character_in_two_steps_is_whole_before_it_is_compared():
    ids = CODEC.encode("naïve caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} \N{GRINNING FACE} end")
    assert len(ids) > 10  # bytes, mostly: the model never saw these letters
    for stop in ("\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{SNOWMAN} ", "\N{GRINNING FACE}", "ï", " end"):
        for cut in (1, 2, 3, 5):
            assert watched(ids, [stop], [cut] * len(ids)) == first_stop(ids, [stop])
    assert watched(ids, ["\N{REPLACEMENT CHARACTER}"], [1] * len(ids)) is None


def test_what_is_complete_before_half_a_character_is_found_at_once():
    """The token that completes the stop string may carry the first byte of the next character."""
    ids = CODEC.encode("stop")
    half = CODEC.encode("\N{SNOWMAN}")[:1]
    watch = StopWatch(CODEC, [], ["stop"])
    stopped = watch.push([*ids, *half])
    assert stopped is not None
    assert stopped.num_tokens == len(ids)


def test_of_several_the_first_in_the_text_wins_then_the_longest():
    ids = CODEC.encode("a b c d e f")
    assert watched(ids, ["e", "c"], [100]) == first_stop(ids, ["c"])
    whole = CODEC.encode("xyz")
    stopped = StopWatch(CODEC, [], ["y", "yz", "xyz!"]).push(whole)
    assert stopped is not None
    assert stopped.stop == ("yz" if len(whole) == 1 else first_stop(whole, ["y", "yz"])[1])


def test_the_prompt_is_not_searched_and_the_first_tokens_are_not_either():
    prompt = CODEC.encode("a stop here")
    assert watched(CODEC.encode(" and on"), ["stop", "here"], [1, 1], prompt=prompt) is None
    ids = CODEC.encode("one two one two")
    early = first_stop(ids, ["two"])
    watch = StopWatch(CODEC, [], ["two"], min_tokens=early[0])
    late = watch.push(ids)
    assert late is not None
    assert late.num_tokens > early[0]


def test_special_tokens_are_text_only_where_they_are_shown():
    special = [token for token in range(2048) if not CODEC.decode([token])]
    shown = CODEC.showing_special_tokens()
    named = next(token for token in special if shown.decode([token]))
    text = shown.decode([named])
    ids = [*CODEC.encode("a"), named]
    assert StopWatch(CODEC, [], [text]).push(ids) is None
    stopped = StopWatch(shown, [], [text]).push(ids)
    assert stopped is not None
    assert stopped.num_tokens == len(ids)


TEXTS = st.text(st.sampled_from("abn e\n(\N{SNOWMAN}\N{LATIN SMALL LETTER E WITH ACUTE}"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    ids=st.one_of(TEXTS.map(CODEC.encode), st.lists(st.integers(3, 2047), min_size=1, max_size=16)),
    stops=st.lists(TEXTS.map(lambda text: text[:3]), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 5), max_size=16),
)
def test_any_output_in_any_steps_stops_where_the_whole_text_says(ids, stops, cuts):
    assert watched(ids, stops, cuts) == first_stop(ids, stops)


def test_a_stream_goes_back_to_where_it_was_marked():
    stream = CODEC.stream()
    ids = CODEC.encode("some words to read")
    text = stream.push(ids[:3])
    mark = stream.mark()
    rest = stream.push(ids[3:])
    stream.back_to(mark)
    assert stream.push(ids[3:]) == rest
    assert text + rest + stream.finish() == "some words to read"
