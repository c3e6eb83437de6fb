"""Groups of 1 to 320 ranks under a virtual clock: they always move, prompts wait no longer than allowed, faults are
named, and a seed gives the same run again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.costs.cost_tables import read_cost_tables
from runtime.costs.costs import StepCosts, StepShape
from runtime.costs.measured import MeasuredOperations
from runtime.failure.judge import Limits
from runtime.failure.verdict import Phase
from runtime.requests.request import Request
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduling.cadence import CadenceConfig, CadenceState, Interval, Reason
from runtime.scheduling.heartbeat import HeartbeatState, decide
from runtime.scheduling.scheduler import SchedulerConfig
from runtime.simulation import simulation
from runtime.simulation.simulated_devices import Devices
from runtime.simulation.simulated_faults import FATAL, Fault, FaultKind, Mishaps, draw_fault
from runtime.simulation.simulated_front import Arrival
from runtime.simulation.simulated_rank import SimulatedRank
from runtime.simulation.simulation import GroupConfig, Simulation, SimulationFailed
from runtime.simulation.simulation_record import Run, StepRecord, Story, Tokens, Window, measure, percentile_ms

TABLES = read_cost_tables(Path(__file__).resolve().parents[3] / "profiles" / "hardware" / "h200.toml")
HARMLESS: list[FaultKind] = [kind for kind in get_args(FaultKind) if kind not in FATAL]


def costs(ranks: int) -> StepCosts:
    return StepCosts(MeasuredOperations(tables=TABLES, ranks=ranks))


def play(config: GroupConfig, arrivals: Sequence[Arrival], *, seed: int = 0, faults: Sequence[Fault] = ()) -> Run:
    return Simulation(config, costs(config.ranks), arrivals, seed=seed, faults=faults).run()


def crowd(ranks: int, *, outputs: int = 60, prompt_len: int = 100, per_rank: int = 2) -> list[Arrival]:
    """Requests that come one after the other, 5 ms apart."""
    return [Arrival(at_us=5000.0 * n, prompt_len=prompt_len, max_tokens=outputs) for n in range(ranks * per_rank)]


def small(interval: Interval = "auto", *, ranks: int = 4, depth: int = 1, **scheduler: int) -> GroupConfig:
    return GroupConfig(
        ranks=ranks,
        async_depth=1 if depth else 0,
        cadence=CadenceConfig(prefill_schedule_interval=interval),
        scheduler=SchedulerConfig(**scheduler),
    )


arrivals = st.lists(
    st.builds(
        Arrival,
        at_us=st.integers(0, 2000).map(lambda ms: 1000.0 * ms),
        prompt_len=st.sampled_from([1, 2, 40, 300, 3000]),
        max_tokens=st.integers(1, 30),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    interval=st.sampled_from([1, 2, 4, 8, "auto"]),
    ranks=st.sampled_from([1, 2, 3, 8, 40]),
    depth=st.sampled_from([0, 1]),
    step_tokens=st.sampled_from([64, 512, 8192]),
    seqs=st.sampled_from([2, 16]),
    blocks=st.sampled_from([48, 60, 3000]),
    target_ms=st.sampled_from([None, 60.0]),
    arrivals=arrivals,
    kinds=st.lists(st.sampled_from(HARMLESS), max_size=3),
    seed=st.integers(0, 1000),
)
def test_a_group_always_moves_and_no_prompt_waits_beyond_its_bound(
    interval, ranks, depth, step_tokens, seqs, blocks, target_ms, arrivals, kinds, seed
):
    """What `simulation_rules` says is checked in every step; here, that all end with all they asked for."""
    config = GroupConfig(
        ranks=ranks,
        async_depth=depth,
        num_blocks=blocks,
        cadence=CadenceConfig(prefill_schedule_interval=interval, itl_target_ms=target_ms),
        scheduler=SchedulerConfig(max_num_batched_tokens=step_tokens, max_num_seqs=seqs),
    )
    faults = [draw_fault(kind, ranks=ranks, first=0, last=30, seed=seed) for kind in kinds]
    run = play(config, arrivals, seed=seed, faults=faults)
    assert run.verdict is None
    assert [story.num_tokens for story in run.stories] == [arrival.max_tokens for arrival in arrivals]
    assert run.longest_put_off <= (4 if interval == "auto" else interval - 1)
    assert run.waves >= 1


@pytest.mark.parametrize("interval", [4, "auto"])
def test_320_ranks_end_what_they_are_given_and_wait_no_longer_than_allowed(interval: Interval):
    run = play(small(interval, ranks=320), crowd(320, per_rank=1, outputs=20))
    assert all(story.ended for story in run.stories)
    assert len({story.rank for story in run.stories}) > 200
    assert 1 <= run.longest_put_off <= (4 if interval == "auto" else 3)


def test_an_idle_rank_takes_every_step_with_no_token():
    run = play(small(1, ranks=3), [Arrival(at_us=0, prompt_len=50, max_tokens=9, rank=1)])
    assert len(run.steps) == 9
    assert {(step.decode_R[0], step.prefill_R[0], step.decode_R[2]) for step in run.steps} == {(0, 0, 0)}


def test_a_group_without_requests_does_nothing():
    run = play(small(), [])
    assert (run.steps, run.stories, run.waves, run.verdict) == ([], [], 1, None)


def test_the_group_sleeps_until_something_comes_and_counts_its_waves():
    run = play(small(1), [Arrival(at_us=n * 5e6, prompt_len=50, max_tokens=4) for n in range(3)])
    assert run.waves == 3
    assert [story.first_us is not None and story.first_us > story.arrival_us for story in run.stories] == [True] * 3


def test_a_release_whose_prompts_are_gone_is_a_step_of_decodes():
    """They are taken back between the proposal and the plan; the step goes on with what decodes."""
    ranks = [SimulatedRank(SchedulerConfig(max_model_len=200), num_pages=50, page_size=4) for _ in range(2)]
    ranks[0].admit(Request(id="decodes", prompt=tuple(range(20)), params=SamplingParams(max_tokens=30), arrival=0))
    state = HeartbeatState.start(CadenceConfig(prefill_schedule_interval=3))
    launched = []
    for sequence in range(5):
        if sequence == 2:
            late = Request(id="late", prompt=tuple(range(30)), params=SamplingParams(max_tokens=5), arrival=1)
            ranks[1].admit(late)
        ballots = [rank.ballot(sequence=sequence, now_us=40e3 * sequence) for rank in ranks]
        plan, state = decide([ballot.vote for ballot in ballots], state)
        if plan.reason is Reason.BEAT:
            ranks[1].scheduler.abort("late")
        rows_R = [rank.launch(ballot.proposal, plan) for rank, ballot in zip(ranks, ballots, strict=True)]
        launched.append((plan.reason, [sum(row.num_tokens for row in rows) for rows in rows_R]))
        for rank in ranks:
            rank.read()
    assert launched[2:] == [(Reason.DEFERRED, [1, 0]), (Reason.BEAT, [1, 0]), (Reason.NO_PROMPTS, [1, 0])]


# The clock


def test_a_step_lasts_as_long_as_its_slowest_rank_and_the_others_wait():
    group = small(1, ranks=2)
    run = play(group, [Arrival(at_us=0, prompt_len=n, max_tokens=1, rank=rank) for rank, n in enumerate((4000, 500))])
    [step] = run.steps
    assert step.length_us == costs(2).step_time([StepShape(prefill_tokens=4000, prefill_position=2000)]).total_us
    assert step.busy_us_R[0] == step.length_us
    assert step.length_us - step.busy_us_R[1] == pytest.approx(step.prompt_us_R[0] - step.prompt_us_R[1])


def test_depth_1_votes_while_a_step_runs_and_reads_it_one_step_later():
    arrival = [Arrival(at_us=0, prompt_len=500, max_tokens=6, rank=0)]
    slow = [replace(small(1, ranks=2, depth=depth), vote_us=2000.0) for depth in (0, 1)]
    shallow, deep = [play(config, arrival) for config in slow]
    starts = [[step.begin_us for step in run.steps] for run in (shallow, deep)]
    ends = [[step.end_us for step in run.steps] for run in (shallow, deep)]
    gaps = [[begin - end for begin, end in zip(s[1:], e, strict=False)] for s, e in zip(starts, ends, strict=True)]
    assert gaps[0] == pytest.approx([2000.0] * 5)
    assert gaps[1] == [0.0] * 5


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_comes_during_a_step_takes_part_in_the_first_one_voted_for_after_it(depth: int):
    first = Arrival(at_us=0, prompt_len=4000, max_tokens=8, rank=0)
    run = play(small(1, ranks=2, depth=depth), [first, Arrival(at_us=1000, prompt_len=300, max_tokens=2, rank=1)])
    assert [step.prefill_R[1] for step in run.steps[:4]] == ([0, 300, 0, 0] if depth == 0 else [0, 0, 300, 0])


def test_waits_are_the_times_between_tokens_and_from_arrival_to_the_first():
    run = Run(
        ranks=2,
        seed=0,
        steps=[
            StepRecord(0, 0.0, 9e3, Reason.OFF, (0, 4), (6, 0), (1.0, 1.0), (1.0, 0.0)),
            StepRecord(1, 9e3, 12e3, Reason.DEFERRED, (1, 4), (0, 0), (1.0, 1.0), (0.0, 0.0)),
            StepRecord(2, 12e3, 14e3, Reason.DEFERRED, (5, 1), (0, 0), (1.0, 1.0), (0.0, 0.0)),
        ],
        stories=[Story(arrival_us=1e3, prompt_len=6, first_us=9e3), Story(arrival_us=11e3, prompt_len=5)],
        tokens=Tokens(),
        waves=1,
        longest_put_off=2,
        end_us=14e3,
        verdict=None,
    )
    for at, gap in ((9e3, 5e3), (12e3, 3e3), (14e3, 2e3)):
        run.tokens.at_us.append(at)
        run.tokens.gap_us.append(gap)
    whole = measure(run, waits=Window(), work=Window())
    assert (whole.p50_itl_ms, whole.p99_itl_ms, whole.mean_ttft_ms) == (3.0, 5.0, 8.0)
    assert whole.output_throughput == pytest.approx(4 / 14e-3)
    assert (whole.deferred_steps, whole.balance_ratio) == (2, (10 + 5 + 6) / (2 * (6 + 4 + 5)))
    late = measure(run, waits=Window(begin_us=12e3), work=Window(begin_us=10e3))
    assert (late.p99_itl_ms, late.mean_ttft_ms, late.deferred_steps) == (3.0, None, 1)
    assert late.output_throughput == pytest.approx(2 / 4e-3)


def test_a_percentile_is_a_value_that_was_there():
    assert [percentile_ms([1e3, 2e3, 3e3, 4e3], share) for share in (0.25, 0.5, 0.51, 0.99)] == [1, 2, 3, 4]
    assert percentile_ms([], 0.5) is None


# Faults


@pytest.mark.parametrize("kind", get_args(FaultKind))
@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_replays_its_faults_exactly_and_another_seed_does_not(kind: FaultKind, seed: int):
    def once(seed: int) -> str:
        fault = draw_fault(kind, ranks=5, first=3, last=12, seed=seed)
        return play(small(ranks=5), crowd(5), seed=seed, faults=[fault]).digest()

    assert once(seed) == once(seed)
    assert once(seed) != once(seed + 2)


@pytest.mark.parametrize("kind", HARMLESS)
def test_a_harmless_fault_costs_time_and_nothing_else(kind: FaultKind):
    fault = draw_fault(kind, ranks=5, first=5, last=12, seed=1)
    clean, hurt = play(small(ranks=5), crowd(5)), play(small(ranks=5), crowd(5), faults=[fault])
    assert [story.num_tokens for story in hurt.stories] == [story.num_tokens for story in clean.stories]
    assert hurt.end_us > clean.end_us
    assert hurt.verdict is None


def test_a_late_vote_delays_the_step_for_all_unless_a_step_still_runs():
    def begins(late_ms: int) -> list[float]:
        fault = Fault(kind="late-vote", rank=2, step=8, late_us=1000.0 * late_ms)
        return [step.begin_us for step in play(small(ranks=4), crowd(4), faults=[fault]).steps]

    clean, short, long = begins(0), begins(5), begins(500)
    assert short == clean
    assert long[8] - long[7] == pytest.approx(500e3 + 100, abs=60e3)


def test_a_slow_rank_makes_the_others_wait_for_it():
    fault = Fault(kind="slow-rank", rank=1, step=10, num_steps=4, factor=3.0)
    run = play(small(ranks=3), crowd(3), faults=[fault])
    for step in run.steps[10:14]:
        assert step.busy_us_R[1] == step.length_us
        assert step.busy_us_R[0] < 0.5 * step.length_us


FATAL_PHASES: list[tuple[FaultKind, Phase]] = [
    (kind, phase)
    for kind in ("raised-error", "lost-rank", "stuck-rank")
    for phase in (Phase.BETWEEN, Phase.VOTE, Phase.DISPATCH, Phase.COMBINE)
]


@pytest.mark.parametrize(("kind", "phase"), FATAL_PHASES)
@pytest.mark.parametrize("rank", [0, 3])
def test_what_ends_a_group_is_named_and_found_in_time(kind: FaultKind, phase: Phase, rank: int):
    fault = Fault(kind=kind, rank=rank, step=9, phase=phase)
    limits = Limits()
    clean, run = play(small(), crowd(4)), play(small(), crowd(4), faults=[fault])
    assert run.verdict is not None
    assert (run.verdict.culprit, run.verdict.step, run.verdict.phase) == (rank, 9, phase)
    struck_us = clean.steps[9].begin_us
    allowed = {"raised-error": 0.0, "lost-rank": limits.silent_s, "stuck-rank": limits.stuck_s}[kind]
    assert run.end_us - struck_us < 1e6 * (allowed + 2 * limits.beat_s)
    assert len(run.steps) == (9 if phase <= Phase.VOTE else 10)
    assert not any(story.ended for story in run.stories)


def test_the_first_of_two_errors_is_the_cause():
    faults = [
        Fault(kind="raised-error", rank=1, step=9, phase=Phase.COMBINE),
        Fault(kind="raised-error", rank=3, step=9, phase=Phase.DISPATCH),
        Fault(kind="raised-error", rank=0, step=10, phase=Phase.BETWEEN),
    ]
    verdict = play(small(), crowd(4), faults=faults).verdict
    assert verdict is not None
    assert verdict.culprit == 3


def test_a_row_of_another_step_stops_everybody_and_names_the_rank():
    run = play(small(), crowd(4), faults=[Fault(kind="stale-vote", rank=2, step=6)])
    assert str(run.verdict) == (
        "rank 2 failed in step 6, vote: ranks disagree on sequence before step 6: rank 2 says 5, rank 0 says 6"
    )


def test_delays_are_drawn_in_the_order_they_are_asked_for():
    fault = Fault(kind="reordered-messages", rank=0, step=3, num_steps=2, late_us=1000.0)
    one, two = Mishaps([fault], seed=5), Mishaps([fault], seed=5)
    delays = [one.vote_delay_us(rank, 4) for rank in range(6)]
    assert delays == [two.vote_delay_us(rank, 4) for rank in range(6)]
    assert delays != sorted(delays)
    assert [one.vote_delay_us(0, 2), one.vote_delay_us(0, 5)] == [0.0, 0.0]


def test_an_unknown_fault_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"fault is 'typhoon'; it must be one of late-vote, .*, e\.g\. late-vote"):
        draw_fault("typhoon", ranks=2, first=0, last=3, seed=0)  # type: ignore[arg-type]


# What a broken rule looks like


def test_a_broken_rule_is_reported_with_the_step_and_the_seed_that_replays_it(monkeypatch: pytest.MonkeyPatch):
    def starving(votes, state):
        plan, after = decide(votes, state)
        if any(vote.prefill_tokens for vote in votes) and any(vote.decode_tokens for vote in votes):
            plan = replace(plan, prefill_allowed=0, reason=Reason.DEFERRED)
        return plan, after

    monkeypatch.setattr(simulation, "decide", starving)
    messages = []
    for _ in range(2):
        with pytest.raises(SimulationFailed) as failed:
            play(small(4), crowd(4, per_rank=8), seed=31)
        messages.append(str(failed.value))
    assert messages[0] == messages[1]
    assert re.fullmatch(r"prompts of rank \d are put off for 4 steps \(in step \d+; seed 31 replays it\)", messages[0])


def test_ranks_that_decide_differently_are_seen(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def unsure(votes, state):
        plan, after = decide(votes, state)
        calls.append(plan)
        return (replace(plan, bucket=plan.bucket + 1) if len(calls) == 30 else plan), after

    monkeypatch.setattr(simulation, "decide", unsure)
    with pytest.raises(SimulationFailed, match=r"ranks \[1\] come to another plan than rank 0 \(in step 7; seed 0"):
        play(small(), crowd(4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be at least 1, e.g. 8"),
        ({"num_blocks": 0}, "num_blocks is 0; it must be at least 1"),
        ({"num_blocks": 2}, "num_blocks is 2; the longest request needs 3 of 64 tokens, e.g. 3"),
    ],
)
def test_an_impossible_group_is_refused_in_words(fields, message):
    with pytest.raises(ValueError, match=message):
        play(GroupConfig(**fields), crowd(1))


def test_devices_run_one_step_after_the_other():
    devices = Devices(costs(2))
    state = HeartbeatState(cadence=CadenceState())
    vote = SimulatedRank(SchedulerConfig(max_model_len=10), num_pages=4, page_size=4).ballot(sequence=0, now_us=0.0)
    plan, _ = decide([vote.vote] * 2, state)
    shapes = [StepShape(decode_tokens=3, context_len=100)] * 2
    first = devices.run(plan, shapes, ready_us=10.0, factors=[1.0, 1.0])
    second = devices.run(plan, shapes, ready_us=20.0, factors=[1.0, 2.0])
    third = devices.run(plan, shapes, ready_us=1e9, factors=[1.0, 1.0])
    assert (first.begin_us, second.begin_us, third.begin_us) == (10.0, first.end_us, 1e9)
    assert second.length_us == pytest.approx(2 * first.length_us)


def test_whoever_waits_is_told_how_many_requests_have_ended():
    told: list[tuple[int, int]] = []
    run = Simulation(small(), costs(4), crowd(4, outputs=5), seed=0).run(lambda done, total: told.append((done, total)))
    total = len(run.stories)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)
    assert len(told) >= len(run.steps)
