"""One page of a file in which a rank shows how it is, for whoever looks on: written every step, read without asking.

The file lies in a folder of the user's own; reading stops nobody, and a rank that hangs or is stopped can be read too.

    words    64-bit integers, see WORDS; `begun` and `ended` count writes: where they differ, one is under way
    heat     how often each expert was asked for lately, all layers together, of neighbours together where there are
             more than HEAT_CELLS; 16 bits a cell, full scale for the hottest
    note     the last thing that the ranks said of their group, UTF-8

Knows memory, numbers and processes; does not know workers (see `showing`) nor how it looks. Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ..failure.verdict import Reason, Verdict

WORDS = (
    "magic", "begun", "ended", "pid", "started", "rank", "size", "state", "beat_ns", "step", "running", "waiting",
    "pages", "free_pages", "computed_tokens", "generated_tokens", "finished", "preemptions",
    "step_us", "own_us", "exchange_us", "beat_us", "cut_steps", "rerun_steps", "overflow_steps",
    "rebalances", "deferred_steps", "slow_steps", "degraded", "mean_pairs", "most_pairs", "prefill_interval", "steps",
    "failed", "culprit", "reason",
)  # fmt: skip
"""mean_pairs and most_pairs: sums over steps, see `telemetry.StepCounters`; prefill_interval: 0 is auto.
failed: the group has, by `culprit` for a `verdict.Reason`."""

HEAT_CELLS = 128
NOTE_BYTES = 240
MAGIC = 0x5352_5450_0001

_PLACE = {name: place for place, name in enumerate(WORDS)}
_HEAT_AT = 8 * 64
_NOTE_AT = _HEAT_AT + 4 + 2 * HEAT_CELLS
PAGE_BYTES = 4096
_TRIES, _PAUSE_S = 500, 1e-4
"""A write takes microseconds, but for a rank that is stopped amid one, or has no core."""


class PageState(IntEnum):
    """What a rank is about, in its own words. The numbers are stored: add, never renumber."""

    STARTING = 0
    IDLE = 1
    STEPS = 2
    ENDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a page said at one moment. `process`: running, stopped or gone, as the system says."""

    words: Mapping[str, int]
    heat: tuple[int, ...]
    note: str
    process: str

    @property
    def state(self) -> PageState:
        return PageState(self.words["state"])

    @property
    def culprit(self) -> int | None:
        """The rank that failed, once the group has."""
        return self.words["culprit"] if self.words["failed"] else None

    @property
    def reason(self) -> str:
        """How it did, in a word."""
        return Reason(self.words["reason"]).name.lower()


class ShowPage:
    """A rank's own page. Written in the rank's thread only, until the group has failed."""

    def __init__(self, path: Path, *, rank: int, size: int) -> None:
        """Makes the file; OSError where that cannot be."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            self._map = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map)[:_HEAT_AT].cast("q")
        self.write({"rank": rank, "size": size, "pid": os.getpid(), "started": _started(os.getpid()) or 0})
        self.write({"state": PageState.STARTING, "magic": MAGIC})

    def write(self, values: Mapping[str, int]) -> None:
        """Put some words, as one."""
        words = self._words
        words[1] += 1
        for name, value in values.items():
            words[_PLACE[name]] = value
        words[2] = words[1]

    def write_heat(self, counts: Sequence[int]) -> None:
        """Put how often each expert was asked for."""
        cells = folded(counts, HEAT_CELLS)
        most = max(cells, default=0) or 1
        scaled = [cell * 0xFFFF // most for cell in cells]
        struct.pack_into(f"<I{len(scaled)}H", self._map, _HEAT_AT, len(scaled), *scaled)

    def write_note(self, text: str) -> None:
        """Put a line; its beginning where it is too long."""
        encoded = text.encode(errors="replace")[:NOTE_BYTES]
        self._map[_NOTE_AT : _NOTE_AT + 2 + len(encoded)] = struct.pack("<H", len(encoded)) + encoded

    def write_verdict(self, verdict: Verdict) -> None:
        """The group has failed; from any thread, and the last word."""
        self.write({"failed": 1, "culprit": verdict.culprit, "reason": verdict.reason})
        self.write_note(str(verdict))

    def close(self) -> None:
        """The rank ends in order: nobody looks at it any more. Twice is once."""
        self.path.unlink(missing_ok=True)


def folded(counts: Sequence[int], cells: int) -> list[int]:
    """As many sums of neighbours as there are cells, or fewer; [1, 2, 3, 4, 5] in 3 is [3, 7, 5]."""
    width = max(1, -(-len(counts) // cells))
    return [sum(counts[place : place + width]) for place in range(0, len(counts), width)]


def read_page(path: Path) -> Shown | None:
    """What the page says now; None where it is no page, or not yet, or no more."""
    try:
        data = _settled(path)
    except (OSError, ValueError):
        return None
    if data is None:
        return None
    words: dict[str, int] = dict(zip(WORDS, struct.unpack_from(f"<{len(WORDS)}q", data), strict=True))
    if words["magic"] != MAGIC or not 0 <= words["state"] <= max(PageState):
        return None
    if words["failed"] and words["reason"] not in list(Reason):
        return None
    (cells,) = struct.unpack_from("<I", data, _HEAT_AT)
    heat = struct.unpack_from(f"<{min(cells, HEAT_CELLS)}H", data, _HEAT_AT + 4)
    (length,) = struct.unpack_from("<H", data, _NOTE_AT)
    note = data[_NOTE_AT + 2 : _NOTE_AT + 2 + min(length, NOTE_BYTES)].decode(errors="replace")
    return Shown(words=words, heat=heat, note=note, process=process_state(words["pid"], words["started"]))


def _settled(path: Path) -> bytes | None:
    """The page's bytes between two writes; of a rank that was stopped amid one, as they are. None for anything else
    that lies there, which is not read: a pipe would not end, nor would some devices."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != PAGE_BYTES:
            return None
        data = b""
        for _ in range(_TRIES):
            begun, ended = _writes(descriptor)
            data = os.pread(descriptor, PAGE_BYTES + 1, 0)
            if len(data) != PAGE_BYTES:
                return None
            if begun == ended == _writes(descriptor)[0]:
                break  # none was under way before, and none has begun since
            time.sleep(_PAUSE_S)
        return data
    finally:
        os.close(descriptor)


def _writes(descriptor: int) -> tuple[int, int]:
    """How many have begun, and have ended; (0, 0) of what is too short for a page."""
    found = os.pread(descriptor, 16, 8)
    return struct.unpack("<2q", found) if len(found) == 16 else (0, 0)


def process_state(pid: int, started: int) -> str:
    """What the system says of a process: "running", "stopped" (by a signal or a debugger), or "gone"."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX" or int(fields[19]) != started:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _started(pid: int) -> int | None:
    """When a process began, in the system's ticks: with the pid it names one process for good."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state first."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
