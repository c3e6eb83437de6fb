"""The host's share of a step: the parts make up the step, and only the thread's own time counts."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

import pytest
import torch

from ep import ThreadGroup, Transport
from runtime.bench.full_house import full_house
from runtime.bench.host_bench import PARTS, HostTimes, Load, PartClock, measure_group
from runtime.control.thread_control import ThreadControl
from runtime.failure.verdict import Phase
from runtime.scheduling.votes import Vote


def measure(load: Load) -> list[list[HostTimes]]:
    """On two ranks: what each of them gets to know."""

    def rank(transport: Transport) -> list[HostTimes]:
        return measure_group(ThreadControl(transport), load, votes=4)

    group: ThreadGroup[list[HostTimes]] = ThreadGroup(2)
    group.start(rank)
    return group.join()


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_rank_hears_the_times_of_all(async_depth: int, temperature: float):
    first, second = measure(Load(requests=6, prompt_len=16, steps=5, async_depth=async_depth, temperature=temperature))
    assert first == second
    assert len(first) == 2
    for times in first:
        assert set(times.parts_us) == set(PARTS)
        assert min(times.parts_us.values()) > 0
        assert 0 < times.step_us <= times.late_step_us < 50_000
        assert times.busy_vote_us > 0
        assert times.idle_vote_us > 0


def test_a_single_request_is_enough():
    [alone, _] = measure(Load(requests=1, prompt_len=1, steps=1))
    assert min(times.step_us for times in alone) > 0


def test_the_parts_of_one_step_make_up_the_step():
    [[times, _], _] = measure(Load(requests=6, prompt_len=16, steps=1))
    assert sum(times.parts_us.values()) == pytest.approx(times.step_us, abs=0.1)


def test_times_travel_as_a_row_as_wide_as_a_vote():
    times = HostTimes(
        parts_us={part: 10.0 + index for index, part in enumerate(PARTS)},
        step_us=100.25,
        late_step_us=120.5,
        busy_vote_us=5.0,
        idle_vote_us=0.125,
        late_idle_vote_us=0.25,
    )
    assert len(times.to_row()) == len(Vote._fields)
    assert HostTimes.from_row(times.to_row()) == times


def test_waiting_for_others_is_no_cpu_time_but_counts_for_the_vote():
    clock = PartClock()
    clock.stamp(Phase.VOTE, 0)
    clock.wait()
    time.sleep(0.05)
    clock.go_on()
    clock.end_step()
    [step_ns], [vote_ns] = clock.steps_ns, clock.votes_ns
    assert vote_ns >= 50e6
    assert step_ns["gather"] < 25e6


def test_work_counts_for_the_part_it_is_done_in():
    clock = PartClock()
    clock.stamp(Phase.SAMPLE, 0)
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    clock.stamp(Phase.READ, 0)
    clock.end_step()
    [step_ns] = clock.steps_ns
    assert step_ns["sample"] >= 10e6
    assert step_ns["finish"] < 10e6


def calls_a_step(load: Load) -> int:
    """Calls of functions, Python's and others, that a step in which all requests decode takes at least."""

    def rank(transport: Transport) -> int:
        clock = PartClock()
        worker = full_house(ThreadControl(transport), load, recorder=clock, emit=clock.tell)
        steps = []
        with torch.inference_mode():
            for _ in range(load.steps):
                num_calls = 0

                def count(frame: FrameType, event: str, arg: Any) -> None:
                    nonlocal num_calls
                    num_calls += event in ("call", "c_call")

                sys.setprofile(count)
                worker.step()
                sys.setprofile(None)
                steps.append(num_calls)
        return min(steps)

    group: ThreadGroup[int] = ThreadGroup(1)
    group.start(rank)
    [num_calls] = group.join()
    return num_calls


def test_a_decode_step_costs_few_calls_and_few_more_for_each_request():
    # What a clock says depends on who else computes; this does not. 597 and 1 when it was written.
    few, many = (calls_a_step(Load(requests=requests, prompt_len=64, steps=8)) for requests in (64, 128))
    assert few <= 700
    assert (many - few) / 64 <= 1.5


def test_a_request_that_is_sampled_costs_a_few_calls_more():
    few, many = (calls_a_step(Load(requests=n, prompt_len=64, steps=8, temperature=0.7)) for n in (64, 128))
    assert (many - few) / 64 <= 19


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        Load(steps=0)
