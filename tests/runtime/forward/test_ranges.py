"""Each phase is one range, and the recorder hears of it as before."""

from __future__ import annotations

from runtime.failure.recorder import Unwatched
from runtime.failure.verdict import Phase
from runtime.forward.ranges import RANGES, RangedRecorder


def test_ranges_follow_each_other_as_phases_do():
    said: list[str] = []
    recorder = RangedRecorder(Unwatched(), push=said.append, pop=lambda: said.append("end"))
    recorder.stamp(Phase.PROPOSE, 3)
    recorder.stamp(Phase.DISPATCH, 3, 7)
    recorder.wait()
    recorder.go_on()
    recorder.predict(0.1)
    assert said == ["propose 3", "end", "dispatch 3 layer 7"]
    assert recorder.waited_ns > 0


def test_a_cpu_has_no_ranges():
    recorder = Unwatched()
    assert RANGES["cpu"](recorder) is recorder
