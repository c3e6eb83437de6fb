"""A step as a queue of kernels: the host launches them one by one, or all of them as one captured graph.

    eager     host    |l1|l2|l3|l4|           device waits for the host where kernels are shorter than launches
              device     |k1|  |k2|  |k3|  |k4|
    graph     host    |graph|
              device        |k1|k2|k3|k4|

A launch is the host's alone, the device runs kernels in order, and what is launched starts a little later. The queue is
bounded: a host that is far ahead waits. Plain numbers; knows no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCosts:
    """What launches cost. The defaults are usual for PyTorch on a server; a profiler says what they are on yours."""

    launch_us: float = 6.0
    """Microseconds of the host for one kernel, the framework's own work included."""

    latency_us: float = 4.0
    """Microseconds from a launch to the earliest start on the device."""

    gap_us: float = 1.0
    """Microseconds between two kernels that follow each other without a graph."""

    graph_us: float = 12.0
    """Microseconds of the host for a whole graph."""

    graph_gap_us: float = 0.5
    """Microseconds between two kernels of a graph."""

    queue: int = 1024
    """Launches that may wait for the device; a host that is further ahead waits, too."""

    def __post_init__(self) -> None:
        for name in ("launch_us", "latency_us", "gap_us", "graph_us", "graph_gap_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0, e.g. 5")
        if self.queue < 1:
            raise ValueError(f"queue is {self.queue}; it must be at least 1, e.g. 1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One kernel on the device, and its launch on the host; in a graph all share one launch."""

    launch_us: tuple[float, float]
    run_us: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A step that was played."""

    spans: tuple[Span, ...]

    @property
    def total_us(self) -> float:
        """Until the last kernel ends."""
        return self.spans[-1].run_us[1] if self.spans else 0.0

    @property
    def busy(self) -> float:
        """Share of that in which the device computes."""
        running = sum([end - begin for begin, end in (span.run_us for span in self.spans)])
        return running / self.total_us if self.total_us else 0.0


def play_eager(kernels_us: Sequence[float], costs: LaunchCosts) -> Played:
    """Each kernel is launched when the host has launched the one before."""
    spans: list[Span] = []
    host_us = end_us = 0.0
    for place, kernel_us in enumerate(kernels_us):
        if place >= costs.queue:
            host_us = max(host_us, spans[place - costs.queue].run_us[0])
        launch = host_us, host_us + costs.launch_us
        ready_us = end_us + costs.gap_us if spans else 0.0
        begin_us = max(launch[1] + costs.latency_us, ready_us)
        host_us, end_us = launch[1], begin_us + kernel_us
        spans.append(Span(launch_us=launch, run_us=(begin_us, end_us)))
    return Played(spans=tuple(spans))


def play_graph(kernels_us: Sequence[float], costs: LaunchCosts) -> Played:
    """All kernels are launched at once."""
    spans: list[Span] = []
    end_us = costs.graph_us + costs.latency_us - costs.graph_gap_us
    for kernel_us in kernels_us:
        begin_us = end_us + costs.graph_gap_us
        end_us = begin_us + kernel_us
        spans.append(Span(launch_us=(0.0, costs.graph_us), run_us=(begin_us, end_us)))
    return Played(spans=tuple(spans))
