"""A picture of the last steps of a group, from its flight records: who did what when, and where each rank stood last.

    step     41        42              a column is a slice of time, its glyph what the rank was about in its middle
    rank 0   rplD.C.sr rplD.........   waits for others
    rank 1   rplD.C.sr rplDxxxxxxxxx   stopped first

Times are each machine's wall clock, so ranks of two machines are as far off as their clocks. Knows records; does not
know what they mean (see `runtime.failure.diagnosis`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from runtime.failure.board import Stamp
from runtime.failure.flight import FlightRecord
from runtime.failure.verdict import Phase

WAITS, STOPPED, NOTHING = ".", "x", " "
GLYPHS = {
    Phase.IDLE: NOTHING,
    Phase.BETWEEN: "-",
    Phase.PROPOSE: "p",
    Phase.VOTE: "v",
    Phase.COMMIT: "c",
    Phase.LAUNCH: "l",
    Phase.DISPATCH: "D",
    Phase.COMBINE: "C",
    Phase.SAMPLE: "s",
    Phase.READ: "r",
    Phase.MIGRATE: "m",
}
LEGEND = (
    "p propose  v vote  c commit  l launch  D dispatch  C combine  s sample  r read  m migrate  . waits  x stopped",
    "a wait in dispatch ends with the experts' own work; on the right, how long each rank stood there when it ended",
)
MAX_ROWS = 16
_TAIL = 4
"""Columns after the last stamp of all."""
_SHORTEST_NS = 1000


class Window(NamedTuple):
    """What is drawn: nanoseconds of the wall clock."""

    begin_ns: int
    end_ns: int
    columns: int

    @property
    def slice_ns(self) -> float:
        return max(self.end_ns - self.begin_ns, _SHORTEST_NS) / self.columns

    def column(self, ns: int) -> int:
        """Where a moment falls."""
        return min(int((ns - self.begin_ns) / self.slice_ns), self.columns - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The last `steps` steps that any rank has seen, without the idle time before the last wave."""

    records: Mapping[int, FlightRecord]
    first: int
    steps: int
    columns: int = 64

    def lines(self) -> list[str]:
        """Step numbers, a line for each rank, the scale and what the glyphs mean; nothing without a stamp."""
        window = self.window()
        if window is None:
            return []
        shown = self._shown()
        lines = [f"{'step':<9} {self._labels(window)}".rstrip()]
        lines += [f"rank {rank:<4} {self.row(self.records[rank], window)} {_ago(self.records[rank])}" for rank in shown]
        if len(shown) < len(self.records):
            lines.append(f"and {len(self.records) - len(shown)} more ranks")
        return [*lines, f"a column: {window.slice_ns / 1e6:.3g} ms", *LEGEND]

    def window(self) -> Window | None:
        """From the first stamp of the first step shown to the last stamp of all."""
        stamps = [(moment(record, stamp), stamp) for record in self.records.values() for stamp in record.stamps]
        if not stamps:
            return None
        numbers = sorted({stamp.step for _, stamp in stamps})[-self.steps :]
        begin = min(ns for ns, stamp in stamps if stamp.step >= numbers[0])
        woken = [moment(record, stamp) for record in self.records.values() if (stamp := _woken(record)) is not None]
        return Window(max([begin, *woken]), max(ns for ns, _ in stamps), self.columns)

    def row(self, record: FlightRecord, window: Window) -> str:
        """What one rank was about, a glyph a column."""
        moments = [moment(record, stamp) for stamp in record.stamps]
        cells, at = [], -1
        for column in range(window.columns):
            middle = window.begin_ns + (column + 0.5) * window.slice_ns
            while at + 1 < len(moments) and moments[at + 1] <= middle:
                at += 1
            cells.append(_glyph(record.stamps[at]) if at >= 0 else NOTHING)
        last = _glyph(record.stamps[-1]) if record.stamps else NOTHING
        if record.rank != self.first:
            return "".join(cells) + last * _TAIL
        if not moments:
            return STOPPED.rjust(window.columns + _TAIL)
        stopped = max(window.column(moments[-1]), 0)
        return "".join([*cells[:stopped], last]) + STOPPED * (window.columns - 1 - stopped + _TAIL)

    def _labels(self, window: Window) -> str:
        """Each step's number where its first stamp falls, if it does not touch the one before."""
        begins: dict[int, int] = {}
        for record in self.records.values():
            for stamp in record.stamps:
                ns = moment(record, stamp)
                begins[stamp.step] = min(begins.get(stamp.step, ns), ns)
        line = ""
        for step, ns in sorted(begins.items()):
            column = window.column(ns)
            if ns >= window.begin_ns and column >= len(line) + bool(line):
                line = line.ljust(column) + str(step)
        return line

    def _shown(self) -> list[int]:
        """All, or as many as have a place: the one that stopped first, and those furthest behind."""
        order = sorted(self.records, key=lambda rank: (rank != self.first, self.records[rank].place, rank))
        return sorted(order[:MAX_ROWS])


def moment(record: FlightRecord, stamp: Stamp) -> int:
    """When a stamp was set, by the wall clock of its machine."""
    return record.wall_ns - (record.monotonic_ns - stamp.ns)


def _woken(record: FlightRecord) -> Stamp | None:
    """The first stamp after the rank was last idle; None when it never was, or still is."""
    found = [after for before, after in pairwise(record.stamps) if before.phase is Phase.IDLE]
    return found[-1] if found and record.stamps[-1].phase is not Phase.IDLE else None


def _glyph(stamp: Stamp) -> str:
    return WAITS if stamp.waits else GLYPHS[stamp.phase]


def _ago(record: FlightRecord) -> str:
    if record.last is None:
        return "before its first step"
    return f"{(record.monotonic_ns - record.last.ns) / 1e9:.3f} s"


def join_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 3", or the first few and how many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
