"""When a step is cut: by thresholds, by times with hysteresis, and with every refusal counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo import Choice, DboConfig, Need, OverlapState, Taken, choose, halted
from dbo.policy import FORGET_STEPS, PATIENCE

AUTO = OverlapState(config=DboConfig(dbo="auto"))


def decodes(tokens: int, **changes) -> Need:
    return Need(
        tokens=tokens, decode_tokens=tokens, context_tokens=1000 * tokens, longest_row=1, has_prompts=False
    )._replace(**changes)


class Machine:
    """Steps of a made-up machine: a floor, a part that grows with tokens, and an exchange that two tracks hide."""

    def __init__(self, *, floor_us: float, token_us: float, exchange_us: float) -> None:
        self.floor_us, self.token_us, self.exchange_us = floor_us, token_us, exchange_us

    def take(self, tokens: int, tracks: int) -> Taken:
        compute = tracks * self.floor_us + tokens * self.token_us
        return Taken(compute, self.exchange_us if tracks == 1 else max(0.0, self.exchange_us - compute))


def run(machine: Machine, state: OverlapState, needs: list[Need]) -> tuple[list[Choice], OverlapState]:
    taken, choices = Taken(0, 0), []
    for need in needs:
        decision = choose(need, taken, state)
        state = decision.state
        choices.append(decision.choice)
        taken = machine.take(need.tokens, decision.tracks)
    return choices, state


def test_off_cuts_nothing_and_counts_nothing():
    state = OverlapState()
    decision = choose(decodes(500), Taken(10, 1000), state)
    assert decision[:3] == (1, 500, Choice.OFF)
    assert decision.state is state


@pytest.mark.parametrize(("tokens", "tracks"), [(1, 1), (31, 1), (32, 2), (500, 2)])
def test_on_cuts_decodes_from_their_threshold(tokens: int, tracks: int):
    state = OverlapState(config=DboConfig(dbo="on"))
    decision = choose(decodes(tokens), Taken(0, 0), state)
    assert decision.tracks == tracks
    assert decision.track_tokens == -(-tokens // tracks)
    assert decision.state.counts == {Choice.CUT if tracks == 2 else Choice.FEW_DECODE_TOKENS: 1}


def test_a_prompt_on_any_rank_makes_the_prefill_threshold_count():
    state = OverlapState(config=DboConfig(dbo="on"))
    few = choose(decodes(511, has_prompts=True, longest_row=200), Taken(0, 0), state)
    assert (few.tracks, few.choice) == (1, Choice.FEW_TOKENS)
    many = choose(decodes(512, has_prompts=True, longest_row=200), Taken(0, 0), state)
    assert (many.tracks, many.track_tokens) == (2, 256 + 199)


def test_auto_does_not_cut_what_is_mostly_one_row():
    decision = choose(decodes(1000, has_prompts=True, longest_row=900), Taken(0, 0), AUTO)
    assert (decision.tracks, decision.choice) == (1, Choice.LOPSIDED)


def test_auto_measures_first_then_cuts_where_the_exchange_is_long():
    machine = Machine(floor_us=100, token_us=10, exchange_us=3000)
    choices, state = run(machine, AUTO, [decodes(64)] * 20)
    assert choices[:4] == [Choice.UNMEASURED, *[Choice.NOT_YET] * (PATIENCE - 1), Choice.CUT]
    assert set(choices[4:]) == {Choice.CUT}
    assert sum(state.counts.values()) == 20


def test_auto_stays_off_where_there_is_next_to_no_exchange():
    choices, _ = run(Machine(floor_us=100, token_us=10, exchange_us=5), AUTO, [decodes(64)] * 300)
    assert Choice.CUT not in choices
    assert choices.count(Choice.NO_GAIN) == 299


def test_smaller_steps_tell_what_half_a_step_takes():
    machine = Machine(floor_us=1000, token_us=10, exchange_us=1200)
    choices, _ = run(machine, AUTO, [decodes(64)] * 5)
    assert Choice.CUT not in choices  # all that is known says twice the whole
    choices, _ = run(machine, AUTO, [*[decodes(32)] * 2, *[decodes(64)] * 10])
    assert choices[-1] is Choice.CUT


def test_what_disappoints_is_undone_and_tried_again_much_later():
    class Deceiving(Machine):
        def take(self, tokens: int, tracks: int) -> Taken:
            return Taken(1000, 2000) if tracks == 1 else Taken(4000, 0)

    machine = Deceiving(floor_us=0, token_us=0, exchange_us=0)
    choices, _ = run(machine, AUTO, [decodes(64)] * (FORGET_STEPS + 40))
    first, *_ = [place for place, choice in enumerate(choices) if choice is Choice.CUT]
    tried = choices[first : first + PATIENCE]
    assert tried == [Choice.CUT] * PATIENCE
    assert Choice.CUT not in choices[first + PATIENCE : first + FORGET_STEPS - 5]
    assert Choice.CUT in choices[first + FORGET_STEPS :]


def test_times_that_waver_around_the_same_do_not_switch_back_and_forth():
    class Wavering(Machine):
        steps = 0

        def take(self, tokens: int, tracks: int) -> Taken:
            self.steps += 1
            noise = 1.03 if self.steps % 2 else 0.97
            return Taken(noise * (1000 if tracks == 1 else 1500), 500 if tracks == 1 else 0)

    choices, _ = run(Wavering(floor_us=0, token_us=0, exchange_us=0), AUTO, [decodes(64)] * 400)
    switches = sum(before is not after for before, after in pairwise(choices))
    assert switches < 8


class Model:
    """Modelled times: so much a token in one track, so much in two."""

    def __init__(self, one: float, two: float) -> None:
        self.one, self.two = one, two

    def times_us(self, need: Need, tracks: int) -> tuple[float, float] | None:
        return None if need.has_prompts else (self.one * need.tokens, self.two * need.tokens)


@pytest.mark.parametrize(("two", "cuts"), [(0.5, True), (0.97, True), (0.99, False), (1.5, False)])
def test_a_model_decides_before_anything_is_measured(two: float, cuts: bool):
    state = replace(AUTO, model=Model(1.0, two))
    for _ in range(PATIENCE):
        decision = choose(decodes(64), Taken(0, 0), state)
        state = decision.state
    assert (decision.tracks == 2) == cuts


def test_measured_times_overrule_the_model():
    state = replace(AUTO, model=Model(1.0, 0.5))
    choices, _ = run(Machine(floor_us=1000, token_us=1, exchange_us=10), state, [decodes(64)] * 30)
    assert Choice.CUT in choices
    assert choices[-1] is Choice.NO_GAIN


def test_a_beat_without_a_step_is_not_measured_twice():
    decision = choose(decodes(64), Taken(0, 0), AUTO)
    once = halted(Taken(100, 50), decision.state)
    assert once.last is None
    assert halted(Taken(900, 900), once) is once
    assert [believed.taken for believed in once.known.values()] == [Taken(100, 50)]


needs = st.builds(
    Need,
    tokens=st.integers(1, 9000),
    decode_tokens=st.integers(0, 300),
    context_tokens=st.integers(0, 10**6),
    longest_row=st.integers(1, 9000),
    has_prompts=st.booleans(),
)


@settings(max_examples=60)
@given(
    mode=st.sampled_from(["off", "on", "auto"]),
    tracks=st.integers(2, 4),
    steps=st.lists(st.tuples(needs, st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30),
)
def test_any_history_gives_a_choice_that_is_counted_once(mode: str, tracks: int, steps: list):
    state = OverlapState(config=DboConfig(dbo=mode, dbo_tracks=tracks))
    for number, (need, compute, exchange) in enumerate(steps):
        decision = choose(need, Taken(compute, exchange), state)
        assert decision == choose(need, Taken(compute, exchange), state)
        assert decision.tracks == (tracks if decision.choice is Choice.CUT else 1)
        assert -(-need.tokens // decision.tracks) <= decision.track_tokens <= need.tokens
        state = decision.state
        assert sum(state.counts.values()) == (0 if mode == "off" else number + 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dbo": "maybe"}, "dbo is 'maybe'; it must be off, on or auto, e.g. auto"),
        ({"dbo_tracks": 1}, "dbo_tracks is 1; it must be at least 2, e.g. 2"),
        ({"dbo_decode_token_threshold": 0}, "dbo_decode_token_threshold is 0; it must be at least 1"),
        ({"comm_sms": -1}, "comm_sms is -1; it must be at least 0"),
        ({"dbo_order": "random"}, "dbo_order is 'random'; it must be abreast or staggered"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DboConfig(**values)
