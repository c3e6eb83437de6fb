"""A rank's timeline is a trace that browsers read: events that fit into each other, and exposed time as a figure."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch

from dbo import Span, Timeline, drive
from ep import Kind, Tag, ThreadTransport, run_ranks
from ep.conformance import check_transport
from runtime.forward.tracing import TracedTransport, steps_of, summary, trace_events, trace_path, write_trace

MS = 1_000_000
STEP = [
    Span("turn", 0, "", 0, 4 * MS),
    Span("comm", 0, "dispatch 3", 3 * MS, 10 * MS),
    Span("turn", 1, "", 4 * MS, 8 * MS),
    Span("wait", 0, "dispatch 3", 8 * MS, 10 * MS),
    Span("turn", 0, "", 8 * MS, 12 * MS),
    Span("step", 0, "step 7", 0, 16 * MS),
]


def test_a_traced_transport_passes_what_any_transport_must():
    run_ranks(2, lambda transport: check_transport(TracedTransport(transport, Timeline())), timeout_s=20.0)


def test_an_exchange_is_noted_from_its_begin_to_the_end_of_its_wait():
    def on_rank(transport: ThreadTransport) -> tuple[Span, ...]:
        timeline = Timeline()
        traced = TracedTransport(transport, timeline)
        send = torch.zeros(2, 1)
        tag = Tag(5, 3, 1, 0, Kind.COMBINE)
        traced.all_to_all(torch.zeros(2, 1), send, recv_splits=[1, 1], send_splits=[1, 1], tag=tag).wait()
        return timeline.spans

    for wait, comm in run_ranks(2, on_rank, timeout_s=20.0):
        assert (wait.lane, wait.track, wait.name) == ("wait", 1, "combine 3")
        assert (comm.lane, comm.track, comm.name) == ("comm", 1, "combine 3")
        assert comm.begin_ns <= wait.begin_ns <= wait.end_ns <= comm.end_ns


def test_the_summary_says_how_much_of_a_step_nothing_hides():
    assert summary(STEP) == "1 steps traced, 16.00 ms each; exposed communication 2.00 ms, 12% of them"
    assert summary([]) == "no step was traced"


def test_a_step_whose_beginning_is_forgotten_is_left_out():
    spans = [*STEP, Span("step", 0, "step 8", 20 * MS, 30 * MS)]
    assert [step.name for step, _ in steps_of(spans)] == ["step 7"]


def test_events_of_a_thread_lie_in_each_other_or_apart():
    timeline = Timeline()

    def track(index: int):
        for layer in range(3):
            begin = timeline.now()
            yield
            timeline.add("wait", index, f"dispatch {layer}", timeline.now())
            timeline.add("comm", index, f"dispatch {layer}", begin)

    begin = timeline.now()
    drive([track(0), track(1)], timeline=timeline)
    timeline.add("step", 0, "step 0", begin)
    events = trace_events(timeline.spans, rank=2)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    assert {event["pid"] for event in events} == {2}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "steps", 1: "track 0", 2: "track 0, exchanges", 3: "track 1", 4: "track 1, exchanges"}
    for thread in names:
        own = [event for event in spans if event["tid"] == thread]
        for before, after in pairwise(own):
            assert before["ts"] <= after["ts"]
            end, until = before["ts"] + before["dur"], after["ts"] + after["dur"]
            assert after["ts"] >= end - 1e-3 or until <= end + 1e-3, (before, after)


def test_every_rank_has_a_file_of_its_own(tmp_path: Path):
    assert trace_path(tmp_path / "trace.json", 0) == tmp_path / "trace.json"
    assert trace_path(tmp_path / "trace.json", 3) == tmp_path / "trace.rank3.json"
    write_trace(tmp_path / "trace.json", STEP, rank=0)
    found = json.loads((tmp_path / "trace.json").read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    [wait] = [event for event in found["traceEvents"] if event.get("cat") == "wait"]
    assert (wait["name"], wait["ts"], wait["dur"]) == ("dispatch 3", 8000.0, 2000.0)
