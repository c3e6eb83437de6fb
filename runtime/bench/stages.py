"""Which part of a step takes how long: a clock that is switched from stage to stage, around the ops as they are.

    rest | norms | rest | append | rest | attention core | rest | norms | router | dispatch .. | routed experts | ..

Ops, decoder, sampler and transport are handed through `Staged`, which switches to a method's stage and back; what lies
between is the stage that was on before. The clock of a device puts its marks into the device's own queue, so that they
may be captured in a graph. Knows methods by name; does not know what they compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from ..graphs.graph_device import Graph, GraphDevice

REST = "what lies between"
PROJECTIONS = "projections"
HEAD = "head"
SAMPLER = "sampler"
STAND_IN = "rows of others (stands in for the wire)"
LAYER_BEGINS = "append"
"""The stage that is entered once in each layer."""

STAGES: dict[str, dict[str, str]] = {
    "attention": {
        "plan": "plan of attention", "append": LAYER_BEGINS, "attend": "attention core", "norm": "norms",
        "add_norm": "norms", "linear": PROJECTIONS,
    },
    "moe": {"route": "router", "mlp": "shared expert", "experts": "routed experts"},
    "exchange": {
        "encode": "pack rows", "find_places": "pack rows", "pack": "pack rows", "add": "add rows up",
        "add_to_places": "add rows up",
    },
    "transport": {"all_to_all": STAND_IN},
    "decoder": {"logits": HEAD},
    "sampler": {"choose": SAMPLER},
}  # fmt: skip
"""By what is handed through, the stage of each method; a method that is not listed belongs to whoever calls it."""


class Interval(NamedTuple):
    """From one mark to the next. `layer` counts from 0; -1 before the first."""

    stage: str
    layer: int
    us: float


class Clock(Protocol):
    """Stamps that are asked for later what lies between them."""

    def stamp(self) -> Any:
        """Now; on a device, when its queue has come so far."""
        ...

    def between_us(self, begin: Any, end: Any) -> float:
        """Microseconds; waits for the device."""
        ...


class ThreadClock:
    """CPU time of this thread: neither waits nor what else the machine does are in it."""

    def stamp(self) -> int:
        return time.thread_time_ns()

    def between_us(self, begin: int, end: int) -> float:
        return (end - begin) / 1e3


class CudaClock:
    """Events of the current stream; captured ones are stamped anew by each replay."""

    def stamp(self) -> torch.cuda.Event:
        capturing = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=capturing)
        event.record()
        return event

    def between_us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


CLOCKS: dict[str, Callable[[], Clock]] = {"cpu": ThreadClock, "cuda": CudaClock}


class Stages:
    """The marks of one step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []
        self._on = False

    def begin(self) -> None:
        """Forget the marks, and mark from now on; stage REST is on."""
        self._marks = []
        self._on = True
        self.switch(REST)

    def end(self) -> None:
        """The step is over."""
        self.switch("")
        self._on = False

    def switch(self, stage: str) -> str:
        """From now on time is this stage's; returns the one that was on."""
        before = self._marks[-1][0] if self._marks else REST
        if self._on:
            self._marks.append((stage, self._clock.stamp()))
        return before

    def intervals(self) -> list[Interval]:
        """Of the last step that was marked, or the last replay of the graph in which it was."""
        layer, found = -1, []
        for (stage, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            layer += stage == LAYER_BEGINS
            found.append(Interval(stage, layer, self._clock.between_us(begin, end)))
        return found


class MarkedGraphs:
    """A device that records, and marks while it does: what runs before to warm up has no marks."""

    def __init__(self, device: GraphDevice, marks: Stages) -> None:
        self._device = device
        self._marks = marks

    def lane(self) -> AbstractContextManager[Any]:
        return self._device.lane()

    def begin(self) -> None:
        self._device.begin()
        self._marks.begin()

    def end(self) -> Graph:
        self._marks.end()
        return self._device.end()


class Staged:
    """`target`, with the methods in `stages` timed."""

    def __init__(self, target: Any, stages: Mapping[str, str], marks: Stages) -> None:
        self._target = target
        self._stages = stages
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        stage = self._stages.get(name)
        return found if stage is None else self._timed(found, stage)

    def _timed(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self._marks.switch(stage)
            value = method(*args, **kwargs)
            self._marks.switch(before)
            return value

        return timed


def medians(steps: Sequence[Sequence[Interval]]) -> list[Interval]:
    """Of steps that were marked alike, interval by interval."""
    alike = {tuple((each.stage, each.layer) for each in step) for step in steps}
    assert len(alike) == 1, f"{len(alike)} different orders of stages in {len(steps)} steps"
    return [
        Interval(parts[0].stage, parts[0].layer, statistics.median([part.us for part in parts]))
        for parts in zip(*steps, strict=True)
    ]


def by_stage(intervals: Sequence[Interval], layers: range | None = None) -> dict[str, float]:
    """Microseconds of each stage in all, of these layers only if any are given; in the order of their first mark."""
    sums: dict[str, float] = {}
    for each in intervals:
        if layers is None or each.layer in layers:
            sums[each.stage] = sums.get(each.stage, 0.0) + each.us
    return sums
