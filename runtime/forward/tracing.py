"""A transport whose exchanges are noted on a timeline, and a rank's timeline as a trace that browsers draw.

The format is the Trace Event Format of Chrome, which Perfetto (ui.perfetto.dev) reads: a list of events, complete ones
("X") with begin and duration in microseconds; a process is a rank, a thread a lane of a track.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dbo import Span, Timeline, exposed_ns
from ep import Pending, Tag, Transport
from ep.wrapping import Wrapping

_LANES = {"step": 0, "turn": 1, "wait": 1, "comm": 2}
_LANES_PER_TRACK = 2


class TracedTransport(Wrapping):
    """A transport that notes when each exchange begins, when its rank waits for it, and when the wait is over."""

    def __init__(self, transport: Transport, timeline: Timeline) -> None:
        super().__init__(transport)
        self._timeline = timeline

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `ep.Transport`."""
        begin_ns = self._timeline.now()
        rows = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return Pending(lambda: self._wait(rows, tag, begin_ns))

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        """See `ep.Transport`."""
        begin_ns = self._timeline.now()
        rows = self._transport.all_gather(row, tag=tag)
        return Pending(lambda: self._wait(rows, tag, begin_ns))

    def _wait(self, rows: Pending[Tensor], tag: Tag, begin_ns: int) -> Tensor:
        name = f"{tag.kind.name.lower()} {tag.layer}"
        wait_ns = self._timeline.now()
        value = rows.wait()
        self._timeline.add("wait", tag.track, name, wait_ns)
        self._timeline.add("comm", tag.track, name, begin_ns)
        return value


def steps_of(spans: Sequence[Span]) -> list[tuple[Span, list[Span]]]:
    """Each step that is there from its begin to its end, with the spans inside it."""
    whole = [span for span in spans if span.lane == "step"]
    inside = sorted([span for span in spans if span.lane != "step"], key=lambda span: span.begin_ns)
    begins = [span.begin_ns for span in inside]
    found = []
    for step in whole:
        parts = inside[bisect_left(begins, step.begin_ns) : bisect_left(begins, step.end_ns)]
        if any(part.lane == "turn" for part in parts):
            found.append((step, parts))
    return found


def summary(spans: Sequence[Span]) -> str:
    """How long steps were, and how much of that no track computed: a line."""
    steps = steps_of(spans)
    if not steps:
        return "no step was traced"
    whole_ms = sum([step.end_ns - step.begin_ns for step, _ in steps]) / 1e6
    exposed_ms = sum([exposed_ns(parts) for _, parts in steps]) / 1e6
    each = len(steps)
    return (
        f"{each} steps traced, {whole_ms / each:.2f} ms each; exposed communication {exposed_ms / each:.2f} ms, "
        f"{exposed_ms / whole_ms:.0%} of them"
    )


def trace_events(spans: Sequence[Span], *, rank: int) -> list[dict[str, Any]]:
    """The spans as events."""
    events: list[dict[str, Any]] = [
        _named("process_name", rank, 0, f"rank {rank}"),
        _named("thread_name", rank, 0, "steps"),
    ]
    for track in sorted({span.track for span in spans if span.lane != "step"}):
        events.append(_named("thread_name", rank, _thread("turn", track), f"track {track}"))
        events.append(_named("thread_name", rank, _thread("comm", track), f"track {track}, exchanges"))
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        events.append(
            {
                "ph": "X",
                "name": span.name or "compute",
                "cat": span.lane,
                "pid": rank,
                "tid": _thread(span.lane, span.track),
                "ts": span.begin_ns / 1000,
                "dur": (span.end_ns - span.begin_ns) / 1000,
            }
        )
    return events


def write_trace(path: Path, spans: Sequence[Span], *, rank: int) -> None:
    """Write one rank's trace. OSError where that cannot be."""
    path.write_text(json.dumps({"traceEvents": trace_events(spans, rank=rank), "displayTimeUnit": "ms"}))


def trace_path(path: Path, rank: int) -> Path:
    """trace.json of rank 0, trace.rank3.json of rank 3: every rank writes its own."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _thread(lane: str, track: int) -> int:
    return _LANES[lane] + (0 if lane == "step" else _LANES_PER_TRACK * track)


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
