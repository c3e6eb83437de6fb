"""Figures of steps against numbers worked out by hand."""

from __future__ import annotations

import pytest

from runtime.bench.step_summary import (
    balancedness,
    batch_figures,
    expert_loads,
    group_steps,
    step_figures,
    timeline,
)
from runtime.forward.part_times import Part
from runtime.requests.measures import RankMeasures, StepMeasure

MS = 1_000_000


def step(
    number: int, *, begin_ms: int = 0, decode: int = 2, prefill: int = 0, exposed: int = 0, **parts: int
) -> StepMeasure:
    wall = tuple(parts.get(part.name.lower(), 0) * MS for part in Part)
    return StepMeasure(
        step=number,
        begin_ns=begin_ms * MS,
        decode_tokens=decode,
        prefill_tokens=prefill,
        rows=decode,
        context_tokens=100 * decode,
        tracks=1 + number % 2,
        exposed_ns=exposed * MS,
        wall_ns=wall,
        cpu_ns=tuple(ns // 2 for ns in wall),
    )


def rank(*steps: StepMeasure, counts: tuple[tuple[int, ...], ...] = ()) -> RankMeasures:
    return RankMeasures(steps=steps, counts_LE=counts)


def test_a_step_of_the_group_has_every_rank_and_lies_in_the_window():
    first = rank(step(0, begin_ms=0), step(1, begin_ms=10), step(2, begin_ms=20), step(3, begin_ms=30))
    second = rank(step(1, begin_ms=910), step(2, begin_ms=920), step(9))
    found = group_steps([first, second], begin_s=0.005, end_s=0.030)
    assert [[each.step for each in group.ranks] for group in found] == [[1, 1], [2, 2]], "clocks of others do not count"


def test_the_step_is_the_slowest_ranks_and_parts_are_the_average_ranks():
    slow = rank(step(0, attention=6, experts=2, dispatch=2, exposed=1), step(1, attention=8, experts=2))
    fast = rank(step(0, attention=2, experts=2, dispatch=6, exposed=5), step(1, attention=4, experts=2, beat=3))
    found = step_figures(group_steps([slow, fast], begin_s=-1, end_s=1))
    assert found["step_ms"]["mean"] == pytest.approx(10.0)
    assert found["parts_ms"]["attention"] == pytest.approx(5.0)
    assert found["parts_ms"]["dispatch"] == pytest.approx(2.0)
    assert found["parts_cpu_ms"]["experts"] == pytest.approx(1.0)
    assert sum(found["parts_ms"].values()) == pytest.approx(9.75)
    assert found["step_cpu_ms"] == pytest.approx(5.0)
    assert found["overhead_cpu_share"] == pytest.approx(11 / 39), "neither attention nor experts nor head"
    assert found["exposed_communication"] == pytest.approx(6 / 39)
    assert found["wait_at_beat"] == pytest.approx(3 / 39)
    assert found["dbo_hit_rate"] == pytest.approx(0.5)
    assert found["context_len"] == pytest.approx(100.0)


def test_steps_with_prompts_do_not_count_as_decode_steps():
    found = step_figures(group_steps([rank(step(0, prefill=5, host=9), step(1, host=1))], begin_s=-1, end_s=1))
    assert (found["steps"], found["decode_steps"]) == (2, 1)
    assert found["step_ms"]["median"] == pytest.approx(1.0)


def test_without_decode_steps_there_are_no_figures():
    found = step_figures(group_steps([rank(step(0, prefill=5))], begin_s=-1, end_s=1))
    assert found["step_ms"] is None
    assert step_figures([])["decode_steps"] == 0


def test_balance_is_mean_over_max_of_tokens_weighted_by_the_step():
    ranks = [rank(step(0, decode=4), step(1, decode=1)), rank(step(0, decode=2), step(1, decode=1))]
    found = batch_figures(group_steps(ranks, begin_s=-1, end_s=1))
    assert found["batch_per_gpu"] == pytest.approx(2.0)
    assert (found["batch_min"], found["batch_max"]) == pytest.approx((1.5, 2.5))
    assert found["balance_ratio"] == pytest.approx(8 / (2 * 5))


def test_expert_loads_are_summed_over_ranks_and_balance_is_averaged_over_layers():
    loads = expert_loads([rank(counts=((1, 2), (3, 3))), rank(counts=((1, 0), (1, 1)))])
    assert loads == [[2, 2], [4, 4]]
    assert balancedness(loads) == 1.0
    assert balancedness([[4, 0], [0, 0], [1, 1]]) == pytest.approx(0.75), "a layer without load is left out"
    assert balancedness([]) is None
    assert expert_loads([rank()]) == []


def test_the_timeline_is_the_end_of_the_run():
    steps = group_steps([rank(*[step(number, begin_ms=number, host=1) for number in range(9)])], begin_s=-1, end_s=1)
    assert [each["step"] for each in timeline(steps, most=3)] == [6, 7, 8]
    assert timeline(steps)[0]["parts_ms"][0][Part.HOST] == 1.0
