"""The rules, one by one, on made-up observations: no clock, no process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.failure.board import Stamp, State
from runtime.failure.judge import (
    Limits,
    Observation,
    Seen,
    judge,
    judge_absence,
    judge_leaving,
    judge_progress,
    judge_silence,
)
from runtime.failure.verdict import BEFORE_STEPS, Phase, Reason

LIMITS = Limits()


def at(phase: Phase, step: int = 7, *, exchanges: int = 0, waits: bool = False) -> Stamp:
    return Stamp(5, 0, step, phase, 1 if exchanges else 0, exchanges, waits)


def rank(number: int, stamp: Stamp | None = None, *, idle_s: float = 0.0, **other) -> Observation:
    fields = {"state": State.READY, "settled": True, "predicted_s": 0.0} | other
    return Observation(rank=number, stamp=stamp if stamp is not None else at(Phase.VOTE), idle_s=idle_s, **fields)


def heard(*observations: Observation, now: float = 100.0) -> dict[int, Seen]:
    return {one.rank: Seen(observation=one, at=now) for one in observations}


def test_an_observation_comes_back_from_its_bytes():
    for one in (rank(319, at(Phase.COMBINE, 2**40, exchanges=200, waits=True), idle_s=2.5, predicted_s=0.037), rank(0)):
        assert Observation.unpack(one.pack()) == one
    before = replace(rank(1), stamp=None, state=State.STARTING, settled=False)
    assert Observation.unpack(before.pack()) == before


def test_a_group_in_which_all_is_well_has_no_verdict():
    seen = heard(*(rank(n) for n in range(4)))
    assert judge(seen, size=4, since=0, now=100.5, limits=LIMITS) is None


def test_a_pulse_is_dead_after_two_seconds_of_silence_and_not_before():
    seen = heard(rank(0), rank(1)) | {2: Seen(observation=rank(2, at(Phase.COMBINE, exchanges=4)), at=98.1)}
    assert judge_silence(seen, now=100.0, limits=LIMITS) is None
    verdict = judge_silence(seen, now=100.2, limits=LIMITS)
    assert (verdict.culprit, verdict.reason, verdict.step, verdict.phase) == (2, Reason.SILENT, 7, Phase.COMBINE)
    assert verdict.cause == "nothing was heard of its pulse for 2.1 s"


def test_before_warm_up_a_pulse_may_be_silent_for_longer():
    loading = rank(1, state=State.STARTING, settled=False)
    seen = {0: Seen(observation=rank(0), at=100.0), 1: Seen(observation=loading, at=72.0)}
    assert judge_silence(seen, now=100.0, limits=LIMITS) is None
    assert judge_silence(seen, now=103.0, limits=replace(LIMITS, silent_s=9)).culprit == 1


def test_of_several_silent_ranks_the_one_silent_for_longest_is_named_with_the_others():
    seen = {n: Seen(observation=rank(n), at=at_s) for n, at_s in enumerate((100.0, 95.0, 90.0, 95.0))}
    verdict = judge_silence(seen, now=100.0, limits=LIMITS)
    assert verdict.culprit == 2
    assert verdict.cause == "nothing was heard of its pulse for 10.0 s, and of ranks 1 and 3"


def test_a_rank_that_never_comes_is_named_after_two_minutes():
    seen = heard(rank(0), rank(2))
    assert judge_absence(seen, size=4, since=0, now=120.0, limits=LIMITS) is None
    verdict = judge_absence(seen, size=4, since=0, now=120.1, limits=LIMITS)
    assert (verdict.culprit, verdict.cause) == (1, "ranks 1 and 3 did not come within 120 s")


def test_the_rank_behind_all_others_is_stuck_not_those_that_wait_for_it():
    seen = heard(
        rank(0, at(Phase.VOTE, 8, waits=True), idle_s=10.1),
        rank(1, at(Phase.VOTE, 8, waits=True), idle_s=10.1),
        rank(2, at(Phase.DISPATCH, 7, exchanges=9), idle_s=10.1),
        rank(3, at(Phase.VOTE, 8, waits=True), idle_s=10.1),
    )
    verdict = judge_progress(seen, size=4, limits=LIMITS)
    assert (verdict.culprit, verdict.reason, verdict.step, verdict.phase) == (2, Reason.STUCK, 7, Phase.DISPATCH)
    assert verdict.cause == (
        "makes no progress for 10.1 s (10 s are allowed); ranks 0, 1 and 3 wait for it, in step 8, vote"
    )


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        (at(Phase.READ, 6), at(Phase.PROPOSE, 7)),
        (at(Phase.PROPOSE), at(Phase.VOTE)),
        (at(Phase.VOTE), at(Phase.VOTE, waits=True)),
        (at(Phase.LAUNCH), at(Phase.DISPATCH, exchanges=1)),
        (at(Phase.DISPATCH, exchanges=3), at(Phase.DISPATCH, exchanges=3, waits=True)),
        (at(Phase.COMBINE, exchanges=4, waits=True), at(Phase.DISPATCH, exchanges=5)),
        (at(Phase.COMBINE, exchanges=9, waits=True), at(Phase.SAMPLE, exchanges=9)),
        (at(Phase.SAMPLE, exchanges=9), at(Phase.READ, exchanges=9)),
    ],
)
@pytest.mark.parametrize("culprit", [0, 3])
def test_who_is_behind_follows_the_order_of_the_program(behind, ahead, culprit):
    seen = heard(*(rank(n, behind if n == culprit else ahead, idle_s=11) for n in range(4)))
    assert judge_progress(seen, size=4, limits=LIMITS).culprit == culprit


def test_a_rank_that_still_stamps_is_slow_not_stuck_however_long_others_wait():
    seen = heard(
        rank(0, at(Phase.VOTE, 8, waits=True), idle_s=500),
        rank(1, at(Phase.COMBINE, exchanges=30), idle_s=0.3),
    )
    assert judge_progress(seen, size=2, limits=LIMITS) is None


def test_a_rank_that_was_heard_before_the_others_moved_is_not_stuck():
    """After a long first step: three have said that they are in step 4, the fourth's word of its wait is older."""
    seen = heard(
        rank(0, at(Phase.READ, 4), idle_s=0.1),
        rank(1, at(Phase.READ, 4), idle_s=0.0),
        rank(2, at(Phase.READ, 4), idle_s=0.1),
        rank(3, at(Phase.VOTE, 1, waits=True), idle_s=11.5),
    )
    assert judge_progress(seen, size=4, limits=LIMITS) is None


def test_a_long_predicted_step_gives_more_time():
    seen = heard(*(rank(n, idle_s=19, predicted_s=4.0 if n == 1 else 0.1) for n in range(4)))
    assert judge_progress(seen, size=4, limits=LIMITS) is None
    assert judge_progress(heard(*(rank(n, idle_s=21, predicted_s=4.0) for n in range(4))), size=4, limits=LIMITS)


def test_a_first_step_of_twenty_seconds_is_not_stuck():
    seen = heard(*(rank(n, idle_s=20, settled=n != 2) for n in range(4)))
    assert judge_progress(seen, size=4, limits=LIMITS) is None


def test_loading_without_a_stamp_is_given_half_an_hour():
    loading = [replace(rank(n), stamp=None, state=State.STARTING, settled=False, idle_s=1700) for n in range(4)]
    assert judge_progress(heard(*loading), size=4, limits=LIMITS) is None
    verdict = judge_progress(heard(*(replace(one, idle_s=1801) for one in loading)), size=4, limits=LIMITS)
    assert (verdict.reason, verdict.step) == (Reason.STUCK, BEFORE_STEPS)


def test_a_group_that_is_idle_waits_for_nobody():
    idle = [rank(n, at(Phase.IDLE), idle_s=100_000) for n in range(4)]
    ready = [replace(rank(n), stamp=None, settled=False, idle_s=100_000) for n in range(4)]
    assert judge_progress(heard(*idle), size=4, limits=LIMITS) is None
    assert judge_progress(heard(*ready), size=4, limits=LIMITS) is None


def test_a_rank_that_stays_idle_is_to_blame_once_another_has_waited_too_long():
    def group(waited: float) -> dict[int, Seen]:
        return heard(
            *(rank(n, at(Phase.VOTE, waits=True), idle_s=waited) for n in range(3)),
            rank(3, at(Phase.IDLE), idle_s=100_000),
        )

    assert judge_progress(group(9), size=4, limits=LIMITS) is None
    verdict = judge_progress(group(11), size=4, limits=LIMITS)
    assert (verdict.culprit, verdict.phase) == (3, Phase.IDLE)
    assert verdict.cause.startswith("does not step for 11.0 s")


def test_when_all_stand_at_one_place_that_is_said():
    verdict = judge_progress(heard(*(rank(n, idle_s=11) for n in range(4))), size=4, limits=LIMITS)
    assert verdict.cause == "makes no progress for 11.0 s (10 s are allowed); all ranks stand there"


def test_ranks_may_end_some_seconds_apart():
    seen = heard(rank(0), rank(1)) | {2: Seen(observation=rank(2, state=State.ENDED), at=95.0)}
    assert judge_leaving(seen, size=3, now=104.9, limits=LIMITS) is None
    assert judge(seen, size=3, since=0, now=100.0, limits=LIMITS) is None


def test_one_that_ends_while_the_others_go_on_is_to_blame():
    seen = heard(rank(0), rank(1), rank(3)) | {2: Seen(observation=rank(2, state=State.ENDED), at=89.0)}
    verdict = judge_leaving(seen, size=4, now=100.0, limits=LIMITS)
    assert (verdict.culprit, verdict.reason) == (2, Reason.GONE)
    assert verdict.cause == "it has ended, and ranks 0, 1 and 3 still go on after 10 s"


def test_one_that_goes_on_when_the_others_have_ended_is_to_blame():
    ended = {n: Seen(observation=rank(n, state=State.ENDED), at=89.0 + n) for n in (0, 1, 2)}
    verdict = judge_leaving(ended | heard(rank(3)), size=4, now=100.0, limits=LIMITS)
    assert (verdict.culprit, verdict.reason) == (3, Reason.STUCK)
    assert verdict.cause == "it still goes on 10 s after rank 0 has ended"


@pytest.mark.parametrize(("field", "value"), [("silent_s", 0), ("stuck_s", -1), ("beat_s", float("nan"))])
def test_a_limit_that_is_not_positive_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = .*must be positive, for example"):
        Limits(**{field: value})


def test_silence_shorter_than_three_beats_is_refused():
    with pytest.raises(ValueError, match=r"silent_s = 0.5: must be at least 3 beats, which is 0.75"):
        Limits(silent_s=0.5)


stamps = st.builds(
    lambda step, phase, exchanges, waits: Stamp(3, 0, step, phase, 0, exchanges, waits),
    st.integers(0, 9),
    st.sampled_from(Phase),
    st.integers(0, 4),
    st.booleans(),
)
observations = st.tuples(
    st.sampled_from(State), st.booleans(), st.none() | stamps, st.floats(0, 4000), st.floats(0, 50)
)


@given(st.lists(observations, min_size=1, max_size=40), st.floats(0, 200), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_every_group_can_be_judged_and_the_culprit_is_one_of_it(found, now, missing):
    seen = {
        n: Seen(
            observation=Observation(
                rank=n, state=state, settled=settled, stamp=stamp, idle_s=idle_s, predicted_s=predicted_s
            ),
            at=now / 2,
        )
        for n, (state, settled, stamp, idle_s, predicted_s) in enumerate(found)
    }
    size = len(seen) + missing
    verdict = judge(seen, size=size, since=0, now=now, limits=LIMITS)
    assert verdict is None or 0 <= verdict.culprit < size
    if verdict is not None and verdict.reason is Reason.STUCK and "progress" in verdict.cause:
        assert seen[verdict.culprit].observation.place == min(
            one.observation.place for one in seen.values() if one.observation.state is not State.ENDED
        )
