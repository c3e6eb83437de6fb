"""What a step costs the host: the parts of a step of a `full_house`, on one rank.

The recorder that a worker stamps is a clock here; the model does nothing, so what is left is the host's share:

    propose   which rows would run; the inbox is looked at
    vote      the row of integers, and on a leaf its way up
    gather    work on everybody's rows, without the wait for them
    decide    from the votes to the plan
    commit    the rows are final
    batch     the rows become tensors, token ids are read from the table
    sample    from fixed logits over a small vocabulary to token ids in the table
    finish    read a step: tokens reach requests, full pages the prefix cache, counts the load
    tell      the step's news as bytes for the front

CPU time is this thread's own: neither waits nor other processes count. Knows no processes and prints nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ..control.control import Control
from ..failure.verdict import Phase
from ..ranks.letters import NewsLetter, frames_of
from ..requests.outputs import News
from ..scheduling.votes import Vote
from .full_house import Load, full_house

__all__ = ["PARTS", "HostTimes", "Load", "PartClock", "measure_group"]

PARTS = ("propose", "vote", "gather", "decide", "commit", "batch", "sample", "finish", "tell")

_PART_OF = {
    Phase.PROPOSE: "propose",
    Phase.VOTE: "vote",
    Phase.COMMIT: "commit",
    Phase.LAUNCH: "batch",
    Phase.SAMPLE: "sample",
    Phase.READ: "finish",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """One rank's medians in microseconds; of what is called late, 90% are below it.

    parts_us       CPU time of each of PARTS
    step_us        CPU time of a whole step; the median of sums, so not quite the sum of medians
    busy_vote_us   from the beginning of a vote to everybody's rows, on the wall, in the steps above
    idle_vote_us   the same among ranks that do nothing but vote
    """

    parts_us: Mapping[str, float]
    step_us: float
    late_step_us: float
    busy_vote_us: float
    idle_vote_us: float
    late_idle_vote_us: float

    def to_row(self) -> list[int]:
        """Nanoseconds, as wide as a vote, so that they travel like one."""
        votes = self.busy_vote_us, self.idle_vote_us, self.late_idle_vote_us
        parts = [self.parts_us[part] for part in PARTS]
        row = [round(1000 * value) for value in (self.step_us, self.late_step_us, *votes, *parts)]
        return row + [0] * (len(Vote._fields) - len(row))

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        """The inverse of `to_row`."""
        step, late_step, busy, idle, late_idle, *parts = [value / 1000 for value in row]
        by_part: dict[str, float] = dict(zip(PARTS, parts, strict=False))  # the row is filled up with zeros
        return cls(
            parts_us=by_part,
            step_us=step,
            late_step_us=late_step,
            busy_vote_us=busy,
            idle_vote_us=idle,
            late_idle_vote_us=late_idle,
        )


def measure_group(control: Control, load: Load, *, votes: int) -> list[HostTimes]:
    """Everybody's times, in rank order; called on all ranks of `control` at the same time.

    votes   among idle ranks; their median is taken
    """
    idle_votes_ns = _time_idle_votes(control, votes)
    clock = _time_steps(control, load)
    steps_ns = [step.total() for step in clock.steps_ns]
    times = HostTimes(
        parts_us={part: _median_us([step[part] for step in clock.steps_ns]) for part in PARTS},
        step_us=_median_us(steps_ns),
        late_step_us=_late_us(steps_ns),
        busy_vote_us=_median_us(clock.votes_ns),
        idle_vote_us=_median_us(idle_votes_ns),
        late_idle_vote_us=_late_us(idle_votes_ns),
    )
    rows = control.gather(times.to_row(), sequence=0).wait()
    return [HostTimes.from_row(row) for row in rows]


def _median_us(values_ns: Sequence[int]) -> float:
    return statistics.median(values_ns) / 1000


def _late_us(values_ns: Sequence[int]) -> float:
    return sorted(values_ns)[len(values_ns) * 9 // 10] / 1000


def _time_idle_votes(control: Control, votes: int) -> list[int]:
    took_ns = []
    row = [control.rank] * len(Vote._fields)
    for sequence in range(votes):
        begin = time.perf_counter_ns()
        control.gather(row, sequence=sequence).wait()
        took_ns.append(time.perf_counter_ns() - begin)
    return took_ns


def _time_steps(control: Control, load: Load) -> PartClock:
    """`load.steps` steps in which all requests decode."""
    clock = PartClock()
    worker = full_house(control, load, recorder=clock, emit=clock.tell)
    clock.forget()
    with torch.inference_mode():
        for _ in range(load.steps):
            worker.step()
            clock.end_step()
    rows = len(worker.in_flight.unread[-1].rows) if worker.in_flight else load.requests
    assert rows == load.requests, f"{rows} rows in the last step; all {load.requests} requests should decode"
    return clock


class PartClock:
    """A `recorder.Recorder` that measures: the thread's CPU time by part of a step, and each vote on the wall."""

    waited_ns = 0

    def __init__(self) -> None:
        self.steps_ns: list[Counter[str]] = []
        self.votes_ns: list[int] = []
        self._step_ns: Counter[str] = Counter()
        self._part = "propose"
        self._since_ns = time.thread_time_ns()
        self._vote_since_ns = 0

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        self.steps_ns.clear()
        self.votes_ns.clear()
        self._step_ns.clear()
        self.enter("propose")

    def end_step(self) -> None:
        """The step is over; what follows belongs to the next one."""
        self.enter("propose")
        self.steps_ns.append(self._step_ns)
        self._step_ns = Counter()

    def enter(self, part: str) -> None:
        """From now on time belongs to `part`."""
        now = time.thread_time_ns()
        self._step_ns[self._part] += now - self._since_ns
        self._part, self._since_ns = part, now

    def tell(self, items: Sequence[News]) -> None:
        """What a rank's process does with the news of a step."""
        self.enter("tell")
        frames_of(NewsLetter(tuple(items)))

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:  # noqa: ARG002  # the protocol's
        """See `recorder.Recorder`."""
        self.enter(_PART_OF[phase])
        if phase is Phase.VOTE:
            self._vote_since_ns = time.perf_counter_ns()

    def wait(self) -> None:
        """See `recorder.Recorder`."""
        self.enter("gather")

    def predict(self, seconds: float) -> None:
        """Nobody waits for it."""

    def go_on(self) -> None:
        """See `recorder.Recorder`."""
        self.votes_ns.append(time.perf_counter_ns() - self._vote_since_ns)
        self.enter("decide")
