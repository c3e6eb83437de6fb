"""The trace of a command's ranks: a file for browsers, and a step as a picture for a terminal.

    track 0    ####    ######..##        # computes   . waits, and nobody computes   = rows under way
    rows           ====      =====
    track 1        ####        ####
    rows               ====

Glyphs alone say everything. Every rank writes the file of its own spans; what they mean is `runtime.forward.tracing`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dbo import UNTIMED, Span, Timeline, Untimed, compute_intervals, exposed_ns
from ep import Transport
from runtime.forward.tracing import TracedTransport, steps_of, summary, trace_path, write_trace

COMPUTE, WAIT, ROWS = "#", ".", "="
LABEL_COLUMNS = 11


class Trace:
    """Timelines of the ranks of this process, and the file that they go to; nothing is noted where there is no path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._timelines: dict[int, Timeline] = {}

    def timeline(self, rank: int) -> Untimed:
        """What a rank's tracks are to tell."""
        return UNTIMED if self._path is None else self._timelines.setdefault(rank, Timeline())

    def transport(self, transport: Transport) -> Transport:
        """The transport of a rank, told to its timeline."""
        timeline = self.timeline(transport.rank)
        return TracedTransport(transport, timeline) if isinstance(timeline, Timeline) else transport

    def finish(self, *, columns: int = 100) -> list[str]:
        """Write the files; what there is to say of the lowest rank here, as lines. OSError where nothing can be
        written."""
        lines = []
        for rank, timeline in sorted(self._timelines.items()):
            assert self._path is not None, "timelines are kept for a path"
            write_trace(trace_path(self._path, rank), timeline.spans, rank=rank)
        for rank, timeline in sorted(self._timelines.items())[:1]:
            lines = [f"rank {rank}: {summary(timeline.spans)}", *picture(timeline.spans, rank=rank, columns=columns)]
            lines.append(f"traces are in {self._path}, one file a rank; ui.perfetto.dev draws them")
        return lines


def check_path(path: Path | None) -> None:
    """ValueError unless a file can be written there."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"trace is {str(path)!r}; it must be a file in a folder that is there, e.g. trace.json")


def picture(spans: Sequence[Span], *, rank: int, columns: int) -> list[str]:
    """The step in the middle of those traced, as long as the median one or nearly so; no lines when there is none."""
    steps = sorted(steps_of(spans), key=lambda step: step[0].end_ns - step[0].begin_ns)
    if not steps:
        return []
    step, parts = steps[len(steps) // 2]
    begin_ns, length_ns = step.begin_ns, step.end_ns - step.begin_ns
    slice_ns = length_ns / max(columns - LABEL_COLUMNS, 1)
    title = (
        f"{step.name} of rank {rank}: {length_ns / 1e6:.2f} ms, {exposed_ns(parts) / 1e6:.2f} ms of it exposed "
        f"communication; a column is {slice_ns / 1e3:.0f} us"
    )
    lines = [title]
    for track in sorted({part.track for part in parts}):
        own = [part for part in parts if part.track == track]
        waits = [part[3:] for part in own if part.lane == "wait"]
        rows = [part[3:] for part in own if part.lane == "comm"]
        work = _cells(compute_intervals(own), COMPUTE, begin_ns, slice_ns, columns)
        still = _cells(waits, WAIT, begin_ns, slice_ns, columns)
        lines.append(
            _labelled(f"track {track}", "".join([a if a != " " else b for a, b in zip(work, still, strict=True)]))
        )
        lines.append(_labelled("rows", _cells(rows, ROWS, begin_ns, slice_ns, columns)))
    lines.append(f"{COMPUTE} computes   {WAIT} waits for rows   {ROWS} rows under way")
    return lines


def _cells(intervals: Sequence[tuple[int, int]], glyph: str, begin_ns: int, slice_ns: float, columns: int) -> str:
    """A column has the glyph when the intervals cover half of it."""
    covered = [0.0] * (columns - LABEL_COLUMNS)
    for begin, end in intervals:
        first, last = (begin - begin_ns) / slice_ns, (end - begin_ns) / slice_ns
        for column in range(max(int(first), 0), min(int(last) + 1, len(covered))):
            covered[column] += min(last, column + 1) - max(first, column)
    return "".join([glyph if share >= 0.5 else " " for share in covered])


def _labelled(name: str, cells: str) -> str:
    return f"{name:<{LABEL_COLUMNS}}{cells}".rstrip()
