"""Steps launched kernel by kernel and as one graph."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.costs.launches import LaunchCosts, play_eager, play_graph

COSTS = LaunchCosts(launch_us=6, latency_us=4, gap_us=1, graph_us=12, graph_gap_us=0.5)


def test_three_long_kernels_by_hand():
    """Launches end at 6, 12, 18; the device is busy from 10 on, and its kernels follow each other."""
    eager = play_eager([20, 20, 20], COSTS)
    assert [span.run_us for span in eager.spans] == [(10, 30), (31, 51), (52, 72)]
    assert [span.launch_us for span in eager.spans] == [(0, 6), (6, 12), (12, 18)]
    assert [span.run_us for span in play_graph([20, 20, 20], COSTS).spans] == [(16, 36), (36.5, 56.5), (57, 77)]


def test_short_kernels_wait_for_their_launches_and_a_graph_does_not():
    eager, graph = play_eager([2.0] * 100, COSTS), play_graph([2.0] * 100, COSTS)
    assert eager.total_us == 100 * 6 + 4 + 2
    assert graph.total_us == 12 + 4 + 100 * 2 + 99 * 0.5
    assert eager.busy == pytest.approx(200 / 606)


def test_a_full_queue_holds_the_host_back():
    eager = play_eager([100.0] * 4, LaunchCosts(launch_us=1, latency_us=0, gap_us=0, queue=2))
    assert [span.launch_us for span in eager.spans] == [(0, 1), (1, 2), (2, 3), (101, 102)]


@given(kernels=st.lists(st.floats(0.1, 100), max_size=30), queue=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_kernels_never_overlap_nor_start_before_their_launch(kernels: list[float], queue: int):
    costs = LaunchCosts(queue=queue)
    for played in (play_eager(kernels, costs), play_graph(kernels, costs)):
        assert [end - begin for begin, end in (span.run_us for span in played.spans)] == pytest.approx(kernels)
        ends = 0.0
        for span in played.spans:
            assert span.run_us[0] >= max(ends, span.launch_us[1])
            ends = span.run_us[1]
        assert played.total_us == ends


def test_no_kernels_take_no_time():
    assert play_eager([], COSTS).total_us == play_graph([], COSTS).busy == 0.0


@pytest.mark.parametrize(("name", "value"), [("launch_us", -1.0), ("queue", 0)])
def test_impossible_costs_are_refused(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be at least"):
        LaunchCosts(**{name: value})
