"""Stragglers: a slow machine is named soon, a rank that only has more to do never; the same on every rank."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep import SerriedError
from runtime import Engine, SamplingParams
from runtime.failure.bare import bare_script
from runtime.failure.straggler import Finding, StragglerConfig, StragglerState, Work, judge, most_times, slowness, watch
from runtime.scheduling.votes import Vote
from runtime.thread_ranks import ThreadRanks
from tests.runtime.mixes import Settings, engine_config

Named = list[tuple[int, Finding]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    bucket: int = 1
    prefill_allowed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What things cost on it, in microseconds; `slow` multiplies all of it, from step `since` on."""

    fixed: float = 2000.0
    token: float = 30.0
    context: float = 0.05
    pair: float = 5.0
    slow: float = 1.0
    since: int = 0

    def time_us(self, work: Work, step: int) -> float:
        cost = self.fixed + self.token * work.decode_tokens + self.context * work.context_tokens
        return (cost + self.pair * work.expert_pairs) * (self.slow if step >= self.since else 1.0)


def follow(
    machines: Sequence[Machine],
    load: Callable[[int, int], Work],
    *,
    steps: int,
    noise: Callable[[], float] = lambda: 1.0,
    config: StragglerConfig | None = None,
) -> tuple[Named, StragglerState]:
    """Let ranks vote for `steps` steps; load(step, rank) is what a rank runs. Returns who was named when."""
    state = StragglerState(config=config or StragglerConfig())
    named: Named = []
    reports = [(0, 0)] * len(machines)
    for step in range(steps):
        works = [load(step, rank) for rank in range(len(machines))]
        votes = [
            Vote(
                sequence=step,
                epoch=0,
                config_hash=0,
                decode_tokens=work.decode_tokens,
                context_tokens=work.context_tokens,
                prefill_tokens=work.prefill_tokens,
                compute_us=time_us,
                expert_pairs=pairs,
            )
            for work, (time_us, pairs) in zip(works, reports, strict=True)
        ]
        found, after = watch(votes, Plan(), state)
        assert watch(votes, Plan(), state) == (found, after)
        named += [(step, finding) for finding in found]
        state = after
        reports = [
            (int(machine.time_us(work, step) * noise()), work.expert_pairs)
            for machine, work in zip(machines, works, strict=True)
        ]
    return named, state


def even(_step: int, _rank: int) -> Work:
    return Work(decode_tokens=8, context_tokens=4000, expert_pairs=64)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(2, 12), rank=st.integers(0, 11), since=st.integers(0, 60), seed=st.integers(0, 999))
def test_a_rank_that_is_twice_as_slow_is_named_within_50_steps_and_nobody_else(size, rank, since, seed):
    rank %= size
    draw = random.Random(seed)
    machines = [Machine(slow=2.0 if index == rank else 1.0, since=since) for index in range(size)]
    named, state = follow(machines, even, steps=since + 50, noise=lambda: draw.uniform(0.9, 1.1))
    assert [(finding.rank, finding.slow) for _, finding in named] == [(rank, True)]
    assert since <= named[0][0] < since + 50
    assert state.slow == (rank,)
    assert state.degraded == ()
    assert 20 <= state.slow_steps_of(rank) <= 50


def test_the_name_comes_after_half_a_window():
    machines = [Machine(), Machine(slow=2.0, since=40), Machine()]
    [(step, finding)], _ = follow(machines, even, steps=90)
    assert step == 40 + 16  # its 16th slow step is voted on in the one after
    assert "rank 1 is a straggler: over the last 32 steps it took 2.0 times as long" in str(finding)


_LOADS = st.tuples(st.integers(0, 64), st.integers(0, 500_000), st.integers(0, 4000))
_COSTS = st.tuples(st.floats(0, 5000), st.floats(0, 500), st.floats(0, 1), st.floats(0, 100))


@settings(max_examples=60, deadline=None)
@given(loads=st.lists(_LOADS, min_size=2, max_size=8), costs=_COSTS, drift=st.integers(0, 3), seed=st.integers(0, 99))
def test_unequal_load_is_never_named_whatever_things_cost(loads, costs, drift, seed):
    draw = random.Random(seed)
    machine = Machine(fixed=costs[0] + 100, token=costs[1], context=costs[2], pair=costs[3])

    def load(step: int, rank: int) -> Work:
        tokens, context, pairs = loads[(rank + (step // 20) * drift) % len(loads)]
        return Work(tokens, context if tokens else 0, pairs)

    named, state = follow([machine] * len(loads), load, steps=100, noise=lambda: draw.uniform(0.95, 1.05))
    assert named == []
    assert sum(state.slow_steps) == 0


def test_idle_ranks_do_not_make_a_busy_one_a_straggler():
    named, state = follow(
        [Machine()] * 4, lambda _, rank: Work(64, 90_000, 512) if rank == 2 else Work(0, 0, 40), steps=99
    )
    assert (named, sum(state.slow_steps)) == ([], 0)


def test_a_rank_with_the_popular_experts_is_no_straggler():
    named, _ = follow([Machine()] * 4, lambda _, rank: Work(8, 4000, 2000 if rank == 3 else 100), steps=99)
    assert named == []


def test_a_slow_machine_is_named_under_unequal_load_too():
    machines = [Machine(slow=2.0 if rank == 1 else 1.0) for rank in range(6)]
    named, _ = follow(machines, lambda step, rank: Work(4 + (rank + step) % 9, 3000 + 100 * rank, 60 + rank), steps=50)
    assert [finding.rank for _, finding in named] == [1]


def test_an_idle_rank_whose_experts_keep_all_others_waiting_is_named():
    machines = [Machine(slow=6.0 if rank == 0 else 1.0) for rank in range(4)]
    named, _ = follow(machines, lambda _, rank: Work(0, 0, 64) if rank == 0 else Work(16, 8000, 64), steps=50)
    assert [finding.rank for _, finding in named] == [0]


def test_steps_in_which_a_rank_computes_prompts_say_nothing_about_it():
    def load(_step: int, rank: int) -> Work:
        return Work(8, 4000, 64, prefill_tokens=2048 if rank == 1 else 0)

    named, state = follow([Machine(), Machine(slow=9.0), Machine()], load, steps=80)
    assert named == []
    assert all(row[1] is None for row in state.slowness)


def test_hiccups_are_no_straggler():
    count = 0

    def noise() -> float:
        nonlocal count
        count += 1
        return 5.0 if count % 4 == 0 and count // 4 % 3 == 0 else 1.0  # rank 3 of 4, every third step

    named, state = follow([Machine()] * 4, even, steps=150, noise=noise)
    assert named == []
    assert state.slow_steps_of(3) > 40


def test_where_all_ranks_scatter_a_slow_one_must_stand_out_further():
    draw = random.Random(3)
    machines = [Machine(slow=1.5 if rank == 2 else 1.0) for rank in range(5)]

    def named(noise: float, scatter: float) -> list[int]:
        config = StragglerConfig(straggler_ratio=1.3, straggler_noise=noise)
        found, _ = follow(
            machines, even, steps=120, noise=lambda: draw.uniform(1 - scatter, 1 + scatter), config=config
        )
        return sorted({finding.rank for _, finding in found})

    assert named(noise=4.0, scatter=0.05) == [2]
    assert named(noise=10.0, scatter=0.5) == []
    assert 2 in named(noise=0.0, scatter=0.5)


def test_a_rank_that_recovers_is_told_and_can_be_named_again():
    row = [100, 100, 100]
    state, told = StragglerState(), []
    for times in [[100, 220, 100]] * 40 + [row] * 40 + [[100, 220, 100]] * 40:
        findings, state = judge(times, [even(0, 0)] * 3, state)
        told += [(finding.rank, finding.slow) for finding in findings]
    assert told == [(1, True), (1, False), (1, True)]


def test_a_drained_rank_stays_degraded_since_idleness_proves_nothing():
    state, told = StragglerState(config=StragglerConfig(straggler_action="drain")), []
    for times in [[100, 220, 100]] * 40 + [[100, 40, 100]] * 80:
        findings, state = judge(times, [even(0, 0)] * 3, state)
        told += [str(finding) for finding in findings]
    assert told == [
        "rank 1 is a straggler: over the last 16 steps it took 2.2 times as long as the others would for its work, "
        "and they waited; it is DEGRADED and gets no new requests"
    ]
    assert state.degraded == (1,)


def test_a_step_that_launched_nothing_is_not_judged():
    votes = [Vote(sequence=0, epoch=0, config_hash=0, decode_tokens=1, compute_us=10**rank) for rank in range(4)]
    _, state = watch(votes, Plan(bucket=0), StragglerState())
    findings, state = watch(votes, Plan(), state)
    assert (findings, state.slowness) == ((), ())
    _, state = watch(votes, Plan(), state)
    assert len(state.slowness) == 1


@pytest.mark.parametrize("case", ["off", "alone"])
def test_nobody_is_watched_when_told_so_or_alone(case):
    config = StragglerConfig(straggler_action="off" if case == "off" else "warn")
    machines = [Machine(slow=5.0)] if case == "alone" else [Machine(slow=5.0), Machine()]
    named, state = follow(machines, even, steps=60, config=config)
    assert named == []
    assert state == StragglerState(config=config)


def test_how_much_longer_a_step_may_take_is_the_largest_factor_of_its_parts():
    other = Work(decode_tokens=4, context_tokens=1000, expert_pairs=10)
    assert most_times(Work(2, 500, 10), other) == 1.0
    assert most_times(Work(8, 1500, 10), other) == 2.0
    assert most_times(Work(0, 0, 0), Work(0, 0, 0)) == 1.0
    assert most_times(Work(1, 0, 0), Work(0, 9, 9)) is None


def test_hundreds_of_ranks_are_judged_in_a_moment_whatever_their_times():
    times = [100 + 10 * rank for rank in range(320)]
    took = []
    for _ in range(3):
        begin = time.process_time()
        found = slowness(times, [even(0, 0)] * 320, ratio=1.5)
        took.append(time.process_time() - begin)
    assert min(took) < 0.05
    assert sum(value is not None and value >= 1.5 for value in found) <= 8


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "straggler_action",
            "kill",
            "straggler_action is 'kill'; it must be one of off, warn, drain, abort, e.g. warn",
        ),
        ("straggler_ratio", 1.0, "straggler_ratio is 1.0; it must be above 1, e.g. 1.5"),
        ("straggler_ratio", float("nan"), "straggler_ratio is nan"),
        ("straggler_window", 3, "straggler_window is 3; it must be at least 4, e.g. 32"),
        ("straggler_noise", -1.0, "straggler_noise is -1.0; it must be at least 0, e.g. 4"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(field, value, words):
    with pytest.raises(ValueError, match=words):
        StragglerConfig(**{field: value})


def test_it_can_be_judged_where_there_is_no_torch(tmp_path: Path):
    program = tmp_path / "judges.py"
    program.write_text("import sys, runtime.failure.straggler\nassert 'torch' not in sys.modules\n")
    subprocess.run(bare_script(program), check=True, timeout=60)


GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def slowed(model: Path, action: str, *, seconds: float, told: list[str]) -> Engine:
    """Three ranks that are threads; before each of rank 1's steps its machine dawdles."""
    config = engine_config(model, Settings(ranks=3))
    straggler = StragglerConfig(straggler_action=action)  # type: ignore[arg-type]
    engine = Engine(replace(config, straggler=straggler), on_notice=told.append)
    assert isinstance(engine._ranks, ThreadRanks)
    table = engine._ranks.workers[1].table
    plain = table.admit

    def admit(rows):
        time.sleep(seconds)
        return plain(rows)

    table.admit = admit  # type: ignore[method-assign]
    return engine


def submit_everywhere(engine: Engine) -> None:
    for rank in range(3):
        for _ in range(2):
            engine.submit([5, 6, 7], GREEDY, rank=rank)


def test_a_slow_rank_is_named_once_in_the_log_and_in_the_stats(small_v3: Path):
    told: list[str] = []
    with slowed(small_v3, "warn", seconds=0.03, told=told) as engine:
        submit_everywhere(engine)
        engine.run()
        stats = engine.stats().ranks
        assert engine.notices == told
    assert len(told) == 1
    assert told[0].startswith("rank 1 is a straggler")
    assert int(told[0].split("[step ")[1].rstrip("]")) < 50
    assert stats[1].slow_steps > 30 > max(stats[0].slow_steps, stats[2].slow_steps)
    assert [rank.degraded for rank in stats] == [False, False, False]


def test_a_drained_rank_gets_no_new_requests_and_finishes_what_it_has(small_v3: Path):
    told: list[str] = []
    with slowed(small_v3, "drain", seconds=0.03, told=told) as engine:
        submit_everywhere(engine)
        assert all(len(output.token_ids) == 48 for output in engine.run())
        assert [rank.degraded for rank in engine.stats().ranks] == [False, True, False]
        outputs = engine.generate([[token] for token in range(5, 11)], replace(GREEDY, max_tokens=2))
    assert len(told) == 1
    assert "DEGRADED" in told[0]
    assert {output.rank for output in outputs} == {0, 2}


def test_abort_ends_the_group_with_the_name_of_the_slow_rank(small_v3: Path):
    engine = slowed(small_v3, "abort", seconds=0.03, told=[])
    submit_everywhere(engine)
    with pytest.raises(SerriedError, match="rank 1 is a straggler"):
        engine.run()
    engine.close()
