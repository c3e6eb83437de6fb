"""The plan is a pure function of everybody's votes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.heartbeat import Disagreement, Vote, decide


def vote(**changes: int) -> Vote:
    base = Vote(sequence=5, epoch=0, config_hash=77, decode_tokens=0, prefill_tokens=0, unfinished=0, in_flight=0)
    return dataclasses.replace(base, **changes)


def test_the_bucket_is_what_the_busiest_rank_runs():
    plan = decide([vote(decode_tokens=3, unfinished=3), vote(decode_tokens=1, prefill_tokens=9, unfinished=2), vote()])
    assert (plan.step, plan.bucket, plan.last, plan.stalled) == (5, 10, False, False)


def test_the_wave_ends_only_when_no_rank_has_a_request():
    assert decide([vote(), vote()]).last
    assert not decide([vote(), vote(unfinished=1, decode_tokens=1)]).last


def test_a_step_without_tokens_waits_for_the_tokens_in_flight():
    plan = decide([vote(unfinished=1), vote(in_flight=1)])
    assert (plan.bucket, plan.last, plan.stalled) == (0, False, False)


def test_work_that_nobody_can_move_is_called_stalled():
    assert decide([vote(unfinished=1), vote()]).stalled


@pytest.mark.parametrize("name", ["sequence", "epoch", "config_hash"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_differs_is_named_with_the_field(name: str, culprit: int):
    votes = [vote() for _ in range(3)]
    votes[culprit] = vote(**{name: 1234})
    with pytest.raises(Disagreement, match=rf"disagree on {name} .* rank {culprit} says 1234") as caught:
        decide(votes)
    assert (caught.value.culprit, caught.value.field) == (culprit, name)


counts = st.integers(0, 1 << 40)


@given(
    st.lists(
        st.builds(
            vote, decode_tokens=counts, prefill_tokens=counts, unfinished=st.integers(0, 3), in_flight=st.integers(0, 2)
        ),
        min_size=1,
        max_size=64,
    )
)
def test_votes_survive_the_wire_and_the_plan_never_depends_on_the_order_of_ranks(votes: list[Vote]):
    assert [Vote.from_row(v.row()) for v in votes] == votes
    assert decide(votes) == decide(list(reversed(votes)))
    plan = decide(votes)
    assert plan.last == (sum(v.unfinished for v in votes) == 0)
    assert all(v.decode_tokens + v.prefill_tokens <= plan.bucket for v in votes)
