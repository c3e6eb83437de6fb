"""Spans of a driven step add up, and waiting counts as exposed only while no track computes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dbo import Span, Timeline, compute_intervals, drive, exposed_ns
from dbo.timeline import length, minus
from ep import Pending

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


@given(intervals, intervals)
def test_minus_keeps_the_moments_that_only_the_first_cover(kept: list, cuts: list):
    def moments(parts: list) -> set[int]:
        return {moment for begin, end in parts for moment in range(begin, end)}

    left = minus(kept, cuts)
    assert moments(left) == moments(kept) - moments(cuts)
    assert length(left) == len(moments(left))
    assert left == sorted(left)


def test_a_wait_is_exposed_where_no_turn_computes():
    spans = [
        Span("turn", 0, "", 0, 10),
        Span("wait", 0, "", 4, 8),
        Span("turn", 1, "", 10, 20),
        Span("wait", 1, "", 15, 19),
        Span("comm", 1, "", 0, 19),
    ]
    assert compute_intervals(spans) == [(0, 4), (8, 15), (19, 20)]
    assert compute_intervals(spans[2:]) == [(10, 15), (19, 20)]
    assert exposed_ns(spans) == 8


def test_on_two_hosts_a_wait_under_another_tracks_compute_is_hidden():
    spans = [Span("wait", 0, "", 0, 10), Span("turn", 0, "", 0, 12), Span("turn", 1, "", 3, 9)]
    assert exposed_ns(spans) == 4


def test_turns_of_a_drive_are_noted_one_after_the_other():
    now = itertools.count(0, 10)

    def track(looks: int):
        for _ in range(looks):
            next(now)
        yield Pending.ready(0)
        next(now)

    timeline = Timeline(now=lambda: next(now))
    drive([track(4), track(2)], timeline=timeline)
    assert [(span.lane, span.track) for span in timeline.spans] == [("turn", index) for index in (0, 1, 0, 1)]
    begins = [span.begin_ns for span in timeline.spans]
    assert begins == sorted(begins)
    assert [span.end_ns - span.begin_ns for span in timeline.spans] == [50, 30, 20, 20]
    assert length([span[3:] for span in timeline.spans]) == 120, "they do not overlap"


def test_a_timeline_keeps_the_latest():
    timeline = Timeline(keep=3)
    for index in range(9):
        timeline.add("turn", index, "", timeline.now())
    assert [span.track for span in timeline.spans] == [6, 7, 8]
