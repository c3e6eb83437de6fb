"""When a step's tracks compute, wait and have rows under way: spans, and how much of the waiting nothing hides.

    turn 0   [------]      [---w---]            a track's turn, from when it is resumed to when it gives the turn away
    turn 1          [------]       [------]
    comm 0        [========]                    from the start of an exchange until its wait is over
    wait 0                   [w]                a turn that could not go on: exposed, unless another track computes

Knows tracks and clocks; does not know layers, nor how a timeline is drawn.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Lane = Literal["turn", "comm", "wait", "step"]
Interval = tuple[int, int]
"""Begin and end, nanoseconds."""

KEPT = 1 << 16
"""Spans that a timeline keeps, the latest."""


class Span(NamedTuple):
    """Something that took from `begin_ns` to `end_ns` on a clock that never goes back."""

    lane: Lane
    track: int
    name: str
    begin_ns: int
    end_ns: int


class Untimed:
    """Keeps nothing and asks no clock."""

    def now(self) -> int:
        """The clock, for `add`."""
        return 0

    def add(self, lane: Lane, track: int, name: str, begin_ns: int) -> None:
        """What began at `begin_ns` ends now."""


UNTIMED = Untimed()


class Timeline(Untimed):
    """Keeps the latest spans of one rank, by the clock that `now` reads."""

    def __init__(self, keep: int = KEPT, *, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._spans: deque[Span] = deque(maxlen=keep)
        self._now = now

    @property
    def spans(self) -> tuple[Span, ...]:
        """In the order in which they ended."""
        return tuple(self._spans)

    def now(self) -> int:
        return self._now()

    def add(self, lane: Lane, track: int, name: str, begin_ns: int) -> None:
        self._spans.append(Span(lane, track, name, begin_ns, self._now()))


def compute_intervals(spans: Sequence[Span]) -> list[Interval]:
    """When any track computed: the tracks' turns without their own waits."""
    intervals: list[Interval] = []
    for track in {span.track for span in spans}:
        own = [span for span in spans if span.track == track]
        turns, waits = [[span[3:] for span in own if span.lane == lane] for lane in ("turn", "wait")]
        intervals += minus(turns, waits)
    return minus(intervals, [])


def exposed_ns(spans: Sequence[Span]) -> int:
    """Waiting for exchanges during which no track computed."""
    return length(minus([span[3:] for span in spans if span.lane == "wait"], compute_intervals(spans)))


def length(intervals: Iterable[Interval]) -> int:
    """What the intervals cover, each moment once."""
    return sum(end - begin for begin, end in _joined(intervals))


def minus(intervals: Iterable[Interval], cuts: Iterable[Interval]) -> list[Interval]:
    """What the intervals cover and the cuts do not, joined and ascending. [(0, 9)] minus [(2, 4)] is
    [(0, 2), (4, 9)]."""
    left: list[Interval] = []
    holes = _joined(cuts)
    place = 0
    for begin, end in _joined(intervals):
        while place < len(holes) and holes[place][1] <= begin:
            place += 1
        for hole_begin, hole_end in holes[place:]:
            if hole_begin >= end:
                break
            if hole_begin > begin:
                left.append((begin, hole_begin))
            begin = hole_end
        if begin < end:
            left.append((begin, end))
    return left


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Ascending, and none touches the next."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif begin < end:
            joined.append((begin, end))
    return joined
