"""Time is counted to the stage that is on, wherever it is switched."""

from __future__ import annotations

import time

import pytest

from runtime.bench.stages import LAYER_BEGINS, REST, Interval, Staged, Stages, ThreadClock, by_stage, medians


class Ticks:
    """A clock that moves on by as much as it is told."""

    def __init__(self) -> None:
        self.now = 0

    def stamp(self) -> int:
        return self.now

    def between_us(self, begin: int, end: int) -> float:
        return float(end - begin)


class Ops:
    """Methods that take so long."""

    def __init__(self, clock: Ticks) -> None:
        self.clock = clock
        self.inner: Ops | None = None

    def append(self, us: int) -> int:
        self.clock.now += us
        return us

    def logits(self, us: int) -> None:
        assert self.inner is not None
        self.clock.now += us
        self.inner.norm(us)
        self.clock.now += us

    def norm(self, us: int) -> None:
        self.clock.now += us


def staged() -> tuple[Ticks, Stages, Ops]:
    clock = Ticks()
    marks = Stages(clock)
    return clock, marks, Staged(Ops(clock), {"append": LAYER_BEGINS, "norm": "norms"}, marks)  # type: ignore[return-value]


def test_what_lies_between_belongs_to_the_stage_that_was_on():
    clock, marks, ops = staged()
    marks.begin()
    clock.now += 1
    assert ops.append(10) == 10
    clock.now += 2
    ops.norm(20)
    clock.now += 4
    ops.append(30)
    marks.end()
    assert marks.intervals() == [
        Interval(REST, -1, 1.0),
        Interval(LAYER_BEGINS, 0, 10.0),
        Interval(REST, 0, 2.0),
        Interval("norms", 0, 20.0),
        Interval(REST, 0, 4.0),
        Interval(LAYER_BEGINS, 1, 30.0),
        Interval(REST, 1, 0.0),
    ]
    assert by_stage(marks.intervals()) == {REST: 7.0, LAYER_BEGINS: 40.0, "norms": 20.0}
    assert by_stage(marks.intervals(), range(1)) == {LAYER_BEGINS: 10.0, REST: 6.0, "norms": 20.0}


def test_a_stage_inside_a_stage_goes_back_to_it():
    clock = Ticks()
    marks = Stages(clock)
    target = Ops(clock)
    target.inner = Staged(Ops(clock), {"norm": "norms"}, marks)  # type: ignore[assignment]
    marks.begin()
    Staged(target, {"logits": "head"}, marks).logits(5)
    marks.end()
    assert by_stage(marks.intervals()) == {REST: 0.0, "head": 10.0, "norms": 5.0}


def test_nothing_is_stamped_between_marked_steps():
    _, marks, ops = staged()
    ops.append(3)
    assert marks.intervals() == []
    marks.begin()
    marks.end()
    before = marks.intervals()
    ops.append(3)
    assert marks.intervals() == before


def test_medians_are_of_steps_marked_alike():
    steps = [[Interval(REST, 0, us)] for us in (1.0, 9.0, 2.0)]
    assert medians(steps) == [Interval(REST, 0, 2.0)]
    with pytest.raises(AssertionError, match="2 different orders"):
        medians([*steps, [Interval("norms", 0, 1.0)]])


def test_the_thread_clock_counts_no_waits():
    clock = ThreadClock()
    begin = clock.stamp()
    time.sleep(0.05)
    assert clock.between_us(begin, clock.stamp()) < 40_000
