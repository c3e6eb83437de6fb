"""What goes over the wire arrives as it was sent; bytes that are no letter are refused, whatever they claim."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.loop.ranks import Admit
from runtime.ranks import wire
from runtime.ranks.letters import AbortLetter, NewsLetter, NoteLetter, ReadyLetter, WaveEndLetter, WaveLetter, letter_of
from runtime.ranks.wire import (
    VERSION,
    FactsLetter,
    FailedLetter,
    FlushLetter,
    ProfileLetter,
    ReportLetter,
    TraceLetter,
    WireError,
    pack,
    unpack_at_front,
    unpack_at_rank,
)
from runtime.requests.kv_log import KvLetter, KvStored
from runtime.requests.outputs import News, Note, TokenLogprob
from runtime.requests.request import FinishReason, Request
from runtime.requests.sampling_params import SamplingParams
from runtime.requests.telemetry import RankStats

STATS = RankStats(
    rank=1, steps=2, idle_steps=0, computed_tokens=5, generated_tokens=3, finished=1, preemptions=0, prefix_queries=4,
    prefix_hits=2, num_pages=8, free_pages=7, running=1, waiting=0, slow_steps=0, degraded=False, expert_balance=1.0,
    overflow_steps=0, rerun_steps=0, cut_steps=0, uncut_steps="", beat_wait_s=0.5,
)  # fmt: skip
FACTS = FactsLetter(
    model_path="m", model_type="deepseek_v3", vocab_size=160, eos_token_ids=(1,), bos_token_id=0, model_dtype="float64",
    kv_cache_dtype="float64", max_num_seqs=16, config_hash="0", startup_s={"load": 0.5}, notes=("a",), version="0",
    commit="0",
)  # fmt: skip
REQUEST = Request(
    id="7", prompt=tuple(range(300)), arrival=3, seed=2**64 - 1, stop_ids=frozenset({1}), cache_salt="s",
    params=SamplingParams(logit_bias={3: 1.5}, seed=2**64 - 1, stop_token_ids=(4,)), choice_index=1,
)  # fmt: skip
NEWS = News("7", (1, 2), (TokenLogprob(1, -0.5, {1: -0.5, 7: -2.0}),), FinishReason.STOP, 3, 1)
TO_RANK = [letter_of(Admit(request=REQUEST)), AbortLetter("7"), WaveLetter(), FlushLetter(), ProfileLetter(3, "t.json")]
TO_FRONT = [
    NewsLetter((NEWS,)),
    NoteLetter(Note(text="slow", degraded=(1,))),
    ReadyLetter(8, 64, 256),
    WaveEndLetter(STATS),
    ReportLetter(STATS),
    FACTS,
    KvLetter(1, False, (-5,), (KvStored(2**63 - 1, None, (1, 2)), KvStored(-(2**63), 7, (3,)))),
    TraceLetter("t.json", "3 steps"),
    FailedLetter(1, "killed"),
]


@pytest.mark.parametrize("letter", TO_RANK, ids=lambda letter: type(letter).__name__)
def test_letters_to_a_rank_arrive_as_they_were_sent(letter):
    assert unpack_at_rank(bytes(pack(letter))) == letter


@pytest.mark.parametrize("letter", TO_FRONT, ids=lambda letter: type(letter).__name__)
def test_letters_to_the_front_door_arrive_as_they_were_sent(letter):
    assert unpack_at_front(bytes(pack(letter))) == letter


def test_another_version_is_refused_by_its_number():
    message = bytes(pack(WaveLetter()))
    with pytest.raises(WireError, match=f"version {VERSION + 1} came; this is version {VERSION}"):
        unpack_at_rank(bytes([VERSION + 1]) + message[1:])


def test_a_letter_of_the_other_direction_is_refused():
    with pytest.raises(WireError, match="no letter"):
        unpack_at_front(bytes(pack(WaveLetter())))
    with pytest.raises(WireError, match="no letter"):
        unpack_at_rank(bytes(pack(TO_FRONT[0])))


def test_a_letter_past_the_limit_is_neither_sent_nor_read(monkeypatch):
    message = bytes(pack(TO_RANK[0]))
    monkeypatch.setattr(wire, "MAX_MESSAGE", 100)
    with pytest.raises(WireError, match="at most 100"):
        pack(TO_RANK[0])
    with pytest.raises(WireError, match="at most 100"):
        unpack_at_rank(message)


def test_sampling_parameters_are_checked_on_their_way_in():
    message = bytes(pack(TO_RANK[0])).replace(
        b"\xabtemperature\xcb?\xf0" + bytes(6), b"\xabtemperature\xcb\xbf\xf0" + bytes(6)
    )
    with pytest.raises(WireError, match="temperature"):
        unpack_at_rank(message)


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa4type" * 100_000,
        b"\x82\xa4type\xa4news\xa5items\xdd\x7f\xff\xff\xff",
        b"\x82\xa4type\xa4news\xa5items\x91\x96\xa17\xdd\x7f\xff\xff\xff",
    ],
    ids=range(8),
)
def test_a_claim_of_more_than_there_is_takes_no_room(claim: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            unpack_at_front(bytes([VERSION]) + claim)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(claim) + (1 << 20)
    finally:
        tracemalloc.stop()


def mutated(rng: random.Random, message: bytes) -> bytes:
    """A message with a few things wrong: bytes changed, cut out, doubled, or its end missing."""
    data = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 16)]
            case 3:
                del data[at:]
            case _:
                data[at:at] = rng.choice(
                    [b"\xdd\xff\xff\xff\xff", b"\xdf\0\1\0\0", b"\xcb\x7f\xf8" + bytes(6), b"\xc0"]
                )
    return bytes(data)


def check_mutations(count: int, seed: int) -> int:
    """Read so many; returns how many were refused. Anything but a letter or a WireError comes out."""
    rng = random.Random(seed)
    messages = [bytes(pack(letter)) for letter in (*TO_RANK, *TO_FRONT)]
    refused = 0
    for _ in range(count):
        message = mutated(rng, rng.choice(messages))
        for unpack in (unpack_at_rank, unpack_at_front):
            try:
                unpack(message)
            except WireError:
                refused += 1
    return refused


def test_mutated_messages_give_letters_or_wire_errors():
    assert check_mutations(3000, seed=1) > 3000


SCALARS = st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
NAMES = st.sampled_from(["type", "items", "id", "stats"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner), max_leaves=12)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200) | VALUES.map(msgspec.msgpack.encode))
def test_no_bytes_give_anything_but_letters_or_wire_errors(encoded: bytes):
    for message in (encoded, bytes([VERSION]) + encoded):
        for unpack in (unpack_at_rank, unpack_at_front):
            with contextlib.suppress(WireError):
                unpack(message)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_hundred_thousand_mutations_leave_no_memory_behind():
    check_mutations(2000, seed=0)
    tracemalloc.start()
    try:
        for seed in range(1, 21):
            check_mutations(10_000, seed)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 1 << 20
    assert peak < 16 << 20
