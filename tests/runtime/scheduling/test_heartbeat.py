"""The plan is a pure function of everybody's votes and the state; it is the same on every rank and always exists."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.terms import MOST_LEVEL
from runtime.scheduling.cadence import CadenceConfig, CadenceState, Reason
from runtime.scheduling.heartbeat import MUST_AGREE, Disagreement, HeartbeatState, Vote, decide
from runtime.scheduling.rerun import MANY, WINDOW, Overflows, raise_words

ROOT = Path(__file__).resolve().parents[3]


def vote(**changes: int) -> Vote:
    return Vote(sequence=5, epoch=3, config_hash=77)._replace(**changes)


def plan_of(*votes: Vote, state: HeartbeatState | None = None):
    return decide(votes, state or HeartbeatState())[0]


def test_the_bucket_is_what_the_busiest_rank_runs():
    plan = plan_of(vote(decode_tokens=3, unfinished=3), vote(decode_tokens=1, prefill_tokens=9, unfinished=2), vote())
    assert (plan.step, plan.epoch, plan.bucket, plan.prefill_allowed) == (5, 3, 10, None)
    assert (plan.last, plan.stalled, plan.failed, plan.reason) == (False, False, None, Reason.OFF)


def test_the_bucket_leaves_out_prompts_that_are_put_off():
    state = HeartbeatState(cadence=CadenceState(config=CadenceConfig(prefill_schedule_interval=4), wave_step=1))
    plan, after = decide([vote(decode_tokens=3, unfinished=3), vote(prefill_tokens=900, unfinished=1)], state)
    assert (plan.bucket, plan.prefill_allowed, plan.reason) == (3, 0, Reason.DEFERRED)
    assert (after.cadence.wave_step, after.cadence.tally.deferred_steps) == (2, 1)


def test_the_wave_ends_only_when_no_rank_has_a_request_or_a_step_in_flight():
    state = HeartbeatState(cadence=CadenceState(wave_step=9, deferred=2, lifted=True), wave=4)
    plan, after = decide([vote(), vote()], state)
    assert (plan.last, plan.wave, plan.bucket) == (True, 4, 0)
    assert (after.wave, after.cadence) == (5, CadenceState())
    assert not plan_of(vote(), vote(unfinished=1, decode_tokens=1)).last
    assert not plan_of(vote(), vote(in_flight=1)).last


def test_a_step_without_tokens_waits_for_the_tokens_in_flight():
    plan = plan_of(vote(unfinished=1), vote(in_flight=1))
    assert (plan.bucket, plan.last, plan.stalled) == (0, False, False)


def test_work_that_nobody_can_move_is_called_stalled():
    assert plan_of(vote(unfinished=1), vote()).stalled
    assert not plan_of(vote(unfinished=1), vote(pause=1)).stalled


def test_a_pause_launches_nothing_and_is_complete_when_nothing_is_in_flight_anywhere():
    busy = [vote(decode_tokens=3, unfinished=3, in_flight=1), vote(prefill_tokens=8, unfinished=1, in_flight=1)]
    state = HeartbeatState.start(CadenceConfig(prefill_schedule_interval=2))
    plan, after = decide([busy[0]._replace(pause=1), busy[1]], state)
    assert (plan.pause, plan.paused, plan.bucket, plan.prefill_allowed) == (True, False, 0, 0)
    assert (plan.reason, after) == (Reason.HALTED, state)
    read = [v._replace(in_flight=0, pause=1) for v in busy]
    assert plan_of(*read, state=after) == plan_of(*read, state=after)
    assert plan_of(*read, state=after).paused
    assert not plan_of(read[0], read[1]._replace(in_flight=1), state=after).paused


def test_a_pause_said_twice_is_the_same_as_once_and_resuming_needs_no_event():
    votes = [vote(decode_tokens=3, unfinished=3), vote(unfinished=0)]
    state = HeartbeatState.start(CadenceConfig(prefill_schedule_interval=2))
    paused = state
    for wishes in ((1, 0), (1, 1), (1, 1), (0, 1)):
        plan, paused = decide([v._replace(pause=wish) for v, wish in zip(votes, wishes, strict=True)], paused)
        assert plan.paused
    assert decide(votes, paused) == decide(votes, state)


def test_a_drain_goes_on_stepping_and_is_complete_when_no_rank_has_work():
    working = plan_of(vote(drain=1), vote(decode_tokens=2, unfinished=2))
    assert (working.drain, working.drained, working.bucket) == (True, False, 2)
    assert not plan_of(vote(drain=1), vote(in_flight=1)).drained
    done = plan_of(vote(drain=1), vote())
    assert (done.drained, done.last) == (True, True)
    assert not plan_of(vote(), vote()).drained


def test_an_error_that_a_rank_votes_stops_everybody_and_names_the_lowest():
    plan = plan_of(vote(decode_tokens=2, unfinished=2), vote(error=9, unfinished=1), vote(error=4))
    assert (plan.failed, plan.bucket, plan.last, plan.stalled) == (1, 0, False, False)
    assert not plan_of(vote(), vote(error=1)).last


@pytest.mark.parametrize("name", ["sequence", "epoch", "config_hash", "last_read"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_differs_is_named_with_the_field(name: str, culprit: int):
    votes = [vote() for _ in range(3)]
    votes[culprit] = vote(**{name: 1234})
    with pytest.raises(Disagreement, match=rf"disagree on {name} .* rank {culprit} says 1234") as caught:
        decide(votes, HeartbeatState())
    assert (caught.value.culprit, caught.value.field) == (culprit, name)


def test_a_step_that_is_unclean_on_one_rank_is_run_again_on_all_and_what_is_clean_everywhere_may_be_finished():
    busy = vote(last_read=4, last_clean=4, in_flight=2, unfinished=3, decode_tokens=3)
    plan, after = decide([busy, busy._replace(last_clean=2), busy], HeartbeatState())
    assert (plan.clean, plan.rerun_from, plan.bucket, plan.reason) == (2, 3, 0, Reason.HALTED)
    assert after.overflows == Overflows(recent=(5,))
    plan, after = decide([busy, busy], after)
    assert (plan.clean, plan.rerun_from, plan.bucket) == (4, None, 3)
    assert after.overflows == Overflows(recent=(5,))


def test_an_unclean_step_is_run_again_in_a_pause_too_and_only_then_the_pause_is_complete():
    read = vote(last_read=4, last_clean=4, in_flight=1, unfinished=1, pause=1)
    plan = plan_of(read, read._replace(last_clean=3))
    assert (plan.rerun_from, plan.pause, plan.paused) == (4, True, False)
    plan = plan_of(read, read)
    assert (plan.rerun_from, plan.clean, plan.paused) == (None, 4, False)
    assert plan_of(read._replace(in_flight=0), read._replace(in_flight=0)).paused


def test_capacities_are_raised_when_many_steps_of_a_window_were_run_again():
    state = HeartbeatState()
    levels = []
    for step in (100, 110, 100 + WINDOW, 101 + WINDOW, 300, 301, 302, 303):
        unclean = vote(sequence=step, last_read=step - 1, last_clean=step - 2, in_flight=1, unfinished=1)
        plan, state = decide([unclean], state)
        levels.append(plan.capacity_level)
    assert levels == [0, 0, 0, 1, 1, 1, 2, 2], "at 164 step 100 is forgotten; at 165 there are three"
    calm, after = decide([vote()], state)
    assert (calm.last, calm.capacity_level, after.overflows) == (True, 2, state.overflows)


def test_capacities_are_raised_no_further_than_the_buffers_have_room_for():
    state = HeartbeatState()
    levels = []
    for step in range(MANY * (MOST_LEVEL + 5)):
        unclean = vote(sequence=step, last_read=step - 1, last_clean=step - 2, in_flight=1, unfinished=1)
        plan, state = decide([unclean], state)
        levels.append(plan.capacity_level)
    assert sorted(set(levels)) == list(range(1 + MOST_LEVEL)), "above it blocks stay as they are, and a note would lie"
    assert "as high as they get" in raise_words(MOST_LEVEL)
    assert "as high as they get" not in raise_words(MOST_LEVEL - 1)


small = st.integers(0, 3)
anything = st.integers(-(1 << 63), (1 << 63) - 1)
FIELDS = tuple(name for name in Vote._fields if name not in MUST_AGREE)


@st.composite
def matrices(draw: st.DrawFn, values: st.SearchStrategy[int] = small, most: int = 320) -> list[Vote]:
    """Votes of 1 to `most` ranks that agree where they must. Few distinct rows, so that large groups stay cheap."""
    rows = draw(st.lists(st.lists(values, min_size=len(FIELDS), max_size=len(FIELDS)), min_size=1, max_size=5))
    picks = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=12))
    num_ranks = draw(st.integers(1, most))
    last_read = draw(values)
    return [
        vote(last_read=last_read, **dict(zip(FIELDS, rows[picks[r % len(picks)]], strict=True)))
        for r in range(num_ranks)
    ]


states = st.builds(
    lambda interval, step, deferred, lifted, recent: HeartbeatState(
        cadence=CadenceState(
            config=CadenceConfig(prefill_schedule_interval=interval), wave_step=step, deferred=deferred, lifted=lifted
        ),
        overflows=Overflows(level=len(recent), recent=tuple(sorted(recent))),
    ),
    st.sampled_from([1, 2, 7, "auto"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
    st.sets(st.integers(0, 4), max_size=MANY - 1),
)


@settings(max_examples=120, deadline=None)
@given(votes=matrices(), state=states)
def test_every_rank_of_a_group_comes_to_the_same_plan_and_none_may_be_left_out(
    votes: list[Vote], state: HeartbeatState
):
    on_the_wire = [v.row() for v in votes]
    plan, after = decide(votes, state)
    for _ in range(min(len(votes), 3)):
        assert decide([Vote.from_row(row) for row in on_the_wire], replace(state)) == (plan, after)
    backwards, after_backwards = decide(list(reversed(votes)), state)
    assert (replace(backwards, failed=plan.failed), after_backwards.wave) == (plan, after.wave)
    work = any(v.unfinished for v in votes)
    unclean = any(v.last_clean < v.last_read for v in votes)
    quiet = not unclean and not any(v.in_flight for v in votes)
    assert (plan.rerun_from is not None) == unclean
    assert all(plan.clean <= v.last_clean for v in votes)
    assert plan.capacity_level == after.overflows.level
    assert after.overflows.level - state.overflows.level in ((0, 1) if unclean else (0,))
    assert len(after.overflows.recent) < MANY
    if unclean:
        assert (plan.rerun_from, plan.bucket, plan.last, plan.paused) == (plan.clean + 1, 0, False, False)
        assert after.cadence == state.cadence
    elif any(v.error for v in votes):
        assert plan.failed is not None
        assert votes[plan.failed].error
    elif work and not plan.pause:
        offered = max(v.decode_tokens for v in votes) or max(v.prefill_tokens for v in votes)
        assert (plan.bucket > 0) == (offered > 0), "some rank could move and the plan moves nobody"
        assert plan.stalled == (quiet and not offered)
        assert plan.bucket >= max(v.decode_tokens for v in votes)
    else:
        assert plan.bucket == 0
        assert plan.last == (quiet and not work)


@settings(max_examples=150, deadline=None)
@given(votes=matrices(values=anything, most=20), state=states)
def test_no_row_of_integers_whatever_makes_decide_raise(votes: list[Vote], state: HeartbeatState):
    assert decide(votes, state) == decide(votes, state)


@settings(max_examples=60, deadline=None)
@given(votes=matrices(most=320), state=states, data=st.data())
def test_a_large_group_names_the_one_rank_that_differs(votes: list[Vote], state: HeartbeatState, data: st.DataObject):
    if len(votes) < 3:
        return
    culprit = data.draw(st.integers(0, len(votes) - 1))
    votes[culprit] = votes[culprit]._replace(sequence=6)
    with pytest.raises(Disagreement) as caught:
        decide(votes, state)
    assert (caught.value.culprit, caught.value.field) == (culprit, "sequence")


@pytest.mark.parametrize("depth", [0, 1])
def test_idleness_is_known_within_as_many_steps_as_are_in_flight(depth: int):
    """Rank 0's last token is sampled in step 4; no more than `depth` steps run after it on any rank."""
    state, launched, unread, left = HeartbeatState(), 0, 0, 1
    for sequence in range(20):
        busy = vote(sequence=sequence, unfinished=left, decode_tokens=left, in_flight=unread)
        plan, state = decide([busy, vote(sequence=sequence, in_flight=unread)], state)
        if plan.last:
            break
        if plan.bucket:
            launched, unread = launched + 1, unread + 1
        while unread > (depth if plan.bucket else 0):
            unread -= 1
            if launched - unread == 4:
                left = 0
    assert (state.wave, launched) == (1, 4 + depth)


BARE = """
import sys, types
for name in ("runtime", "ep", "dbo", "attention_mla"):
    room = types.ModuleType(name)
    room.__path__ = [name]
    sys.modules[name] = room
import runtime.scheduling.heartbeat, runtime.scheduling.cadence, runtime.scheduling.votes
import runtime.costs.costs, runtime.costs.measured, runtime.costs.roofline, runtime.ranks.routing
print("torch" in sys.modules, "numpy" in sys.modules)
"""


def test_the_heartbeat_is_importable_without_torch():
    found = subprocess.run(
        [sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == ["False", "False"]
