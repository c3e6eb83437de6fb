"""Prompts are computed on all ranks in the same steps, never later than their bound, at once when nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.scheduling.cadence import CadenceConfig, CadenceState, CadenceTally, Interval, Reason, advance, tokens_run
from runtime.scheduling.votes import Vote

INTERVALS: list[Interval] = [1, 2, 3, 8, "auto"]


def vote(*, decode: int = 0, prefill: int = 0, ready: bool = False, wait_ms: int = 0, **others: int) -> Vote:
    return Vote(
        sequence=5,
        epoch=0,
        config_hash=77,
        decode_tokens=decode,
        prefill_tokens=prefill,
        prefill_ready=int(ready),
        oldest_prefill_wait_ms=wait_ms,
        spare_tokens=others.pop("spare_tokens", 100),
        **others,
    )


def state(interval: Interval, **config: int) -> CadenceState:
    return CadenceState(config=CadenceConfig(prefill_schedule_interval=interval, **config))


def run(votes: list[Vote], start: CadenceState, num_steps: int) -> list[Reason]:
    """The reasons of so many steps with the same votes."""
    reasons = []
    for _ in range(num_steps):
        _, start, reason = advance(votes, start)
        reasons.append(reason)
    return reasons


DECODES = vote(decode=4)
PROMPT = vote(prefill=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill_schedule_interval": 0}, "prefill_schedule_interval is 0; it must be auto or at least 1, e.g. 1"),
        ({"prefill_schedule_interval": "never"}, "prefill_schedule_interval is 'never'; it must be auto"),
        ({"prefill_max_delay_steps": 0}, "prefill_max_delay_steps is 0; it must be at least 1"),
        ({"prefill_max_delay_ms": -1}, "prefill_max_delay_ms is -1; it must be at least 1"),
        ({"prefill_ready_tokens": 0}, "prefill_ready_tokens is 0; it must be at least 1"),
        ({"itl_target_ms": 0.0}, "itl_target_ms is 0.0; it must be above 0, e.g. 50"),
    ],
)
def test_an_impossible_cadence_is_refused_in_words(fields, message):
    with pytest.raises(ValueError, match=message):
        CadenceConfig(**fields)


def test_a_fixed_interval_counts_its_steps_from_the_start_of_the_wave():
    beat, wait = Reason.BEAT, Reason.DEFERRED
    assert run([DECODES, PROMPT], state(3), 7) == [beat, wait, wait, beat, wait, wait, beat]
    _, after, _ = advance([DECODES], state(3))
    assert run([DECODES, PROMPT], after, 3) == [wait, wait, beat]
    assert run([DECODES, PROMPT], after.next_wave(), 2) == [beat, wait]


def test_a_deferred_step_allows_no_rank_a_prompt_not_even_one_that_decodes_nothing():
    _, after, _ = advance([DECODES], state(2))
    allowance, _, reason = advance([DECODES, PROMPT, vote(decode=2, prefill=50)], after)
    assert (allowance, reason) == (0, Reason.DEFERRED)
    assert [tokens_run(v, allowance) for v in (DECODES, PROMPT)] == [4, 0]


def test_a_beat_without_prompts_is_a_step_of_decodes():
    allowance, after, reason = advance([DECODES, vote()], state(2))
    assert (reason, after.wave_step, after.deferred) == (Reason.NO_PROMPTS, 1, 0)
    assert tokens_run(DECODES, allowance) == 4


@pytest.mark.parametrize("interval", [2, 8, "auto"])
def test_prompts_go_at_once_when_nobody_decodes_anywhere(interval: Interval):
    start = replace(state(interval), wave_step=5)
    assert advance([PROMPT, vote()], start).reason is Reason.NOTHING_DECODES
    assert advance([PROMPT, vote(decode=1)], start).reason is Reason.DEFERRED


def test_auto_releases_when_every_rank_with_prompts_is_ready():
    ready = vote(decode=3, prefill=10, ready=True)
    many = vote(decode=3, prefill=2048)
    few = vote(decode=3, prefill=2047)
    assert advance([ready, many, DECODES], state("auto")).reason is Reason.READY
    assert advance([ready, few, DECODES], state("auto")).reason is Reason.DEFERRED
    assert advance([few, DECODES], state("auto", prefill_ready_tokens=2000)).reason is Reason.READY


def test_auto_puts_prompts_off_for_a_bounded_number_of_steps():
    reasons = run([DECODES, PROMPT], state("auto", prefill_max_delay_steps=3), 8)
    assert reasons == [Reason.DEFERRED] * 3 + [Reason.STEPS] + [Reason.DEFERRED] * 3 + [Reason.STEPS]


def test_auto_puts_prompts_off_for_a_bounded_time_that_any_rank_may_reach():
    bound = state("auto", prefill_max_delay_ms=200)
    assert advance([DECODES, vote(prefill=9, wait_ms=199), PROMPT], bound).reason is Reason.DEFERRED
    assert advance([DECODES, vote(prefill=9, wait_ms=200), PROMPT], bound).reason is Reason.TIME


def test_steps_without_prompts_start_the_delay_anew():
    _, after, _ = advance([DECODES, PROMPT], state("auto", prefill_max_delay_steps=2))
    _, after, _ = advance([DECODES], after)
    assert run([DECODES, PROMPT], after, 3) == [Reason.DEFERRED, Reason.DEFERRED, Reason.STEPS]


@pytest.mark.parametrize("interval", [4, "auto"])
def test_a_release_that_leaves_prompts_behind_for_lack_of_tokens_lifts_the_throttle_until_they_are_computed(interval):
    full = vote(decode=4, prefill=100, ready=True, waiting=3, spare_tokens=0)
    rest = vote(decode=4, prefill=100)
    first = advance([full, DECODES], state(interval))
    assert first.state.lifted
    second = advance([full, DECODES], first.state)
    third = advance([rest, DECODES], second.state)
    fourth = advance([rest, DECODES], third.state)
    assert [second.reason, third.reason, fourth.reason] == [Reason.CAPACITY, Reason.CAPACITY, Reason.DEFERRED]


def test_a_lifted_throttle_falls_when_the_queue_is_gone():
    lifted = replace(state(4), lifted=True, wave_step=1)
    assert not advance([DECODES, DECODES], lifted).state.lifted
    assert advance([DECODES, vote(decode=9, waiting=2, spare_tokens=0)], lifted).state.lifted


def test_prompts_that_wait_for_slots_or_pages_do_not_lift_the_throttle():
    blocked = vote(decode=4, prefill=100, waiting=50, free_slots=0, spare_tokens=4000)
    assert run([blocked, DECODES], state(3), 4) == [Reason.BEAT, Reason.DEFERRED, Reason.DEFERRED, Reason.BEAT]


@dataclass(frozen=True)
class Fixed:
    """A budget that says the same in every step."""

    tokens: int

    def prefill_tokens(self, *, decode_tokens: int, context_tokens: int, prefill_start: int) -> int:
        assert (decode_tokens, context_tokens, prefill_start) == (4, 900, 64)
        return self.tokens


def test_the_latency_budget_bounds_what_a_release_allows_and_the_rest_follows_at_once():
    start = replace(state(4), budget=Fixed(30))
    votes = [vote(decode=4, context_tokens=500), vote(decode=1, prefill=70, context_tokens=900, prefill_start=64)]
    allowance, after, reason = advance(votes, start)
    assert (allowance, reason, after.lifted) == (30, Reason.BEAT, True)
    assert after.tally.tokens == 4 + 1 + 30
    assert advance(votes, after).reason is Reason.CAPACITY


def test_a_budget_never_starves_prompts_and_bounds_nothing_when_nobody_decodes():
    votes = [vote(decode=4, context_tokens=900), vote(prefill=70, prefill_start=64)]
    assert advance(votes, replace(state(1), budget=Fixed(-5))).allowance == 1
    assert advance([vote(prefill=70)], replace(state(1), budget=Fixed(-5))).allowance is None


def test_the_tally_counts_deferrals_releases_and_balance():
    tally = CadenceTally().add(Reason.DEFERRED, [4, 4]).add(Reason.BEAT, [10, 2]).add(Reason.BEAT, [6, 2])
    tally = tally.add(Reason.NO_PROMPTS, [2, 2]).add(Reason.CAPACITY, [2, 2])
    assert (tally.deferred_steps, dict(tally.releases)) == (1, {Reason.BEAT: 2, Reason.CAPACITY: 1})
    assert tally.balance_ratio == (8 + 12 + 8 + 4 + 4) / (2 * (4 + 10 + 6 + 2 + 2))
    assert CadenceTally().balance_ratio == 1.0


tokens = st.sampled_from([0, 0, 0, 1, 7, 300, 5000])
any_vote = st.builds(
    vote,
    decode=tokens,
    prefill=tokens,
    ready=st.booleans(),
    wait_ms=st.integers(0, 700),
    waiting=st.integers(0, 2),
    spare_tokens=st.integers(0, 2),
)


@settings(max_examples=60, deadline=None)
@given(
    interval=st.sampled_from(INTERVALS),
    steps=st.lists(st.lists(any_vote, min_size=4, max_size=4), min_size=1, max_size=40),
)
def test_no_sequence_of_votes_puts_prompts_off_longer_than_the_bound(interval: Interval, steps: list[list[Vote]]):
    now = state(interval)
    bound = now.config.prefill_max_delay_steps if interval == "auto" else interval - 1
    put_off = 0
    for votes in steps:
        before = now
        allowance, now, reason = advance(votes, before)
        put_off = put_off + 1 if reason is Reason.DEFERRED else 0
        assert put_off <= bound
        assert all(tokens_run(v, allowance) >= v.decode_tokens for v in votes)
        if reason is Reason.DEFERRED:
            assert any(v.decode_tokens for v in votes), "prompts wait although nobody decodes"
            assert interval != "auto" or max(v.oldest_prefill_wait_ms for v in votes if v.prefill_tokens) < 500
        else:
            assert allowance is None
        assert advance(list(votes), before) == (allowance, now, reason)
