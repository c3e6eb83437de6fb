"""The flight record: what a rank's board says after the end, kept in a file.

Knows boards and files; does not know how the end came about, nor what several files say together (see `diagnosis`).
A file is JSON, so that people can read it:

    run, rank, size, pid, host  whose it is; `run` is the same in all records of one start of a group, and in no other
    written_by                 "rank", or "pulse" where the rank could not write it any more
    monotonic_ns, wall_ns      both clocks when it was written: stamps are monotonic, machines agree on wall time only
    verdict, error             as on the board, or null; with the error its traceback
    steps                      the last 64, each {"step": n, "stamps": [[phase, layer, waits, monotonic ns], ...]}
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .board import Board, Stamp, State
from .verdict import Phase, Reason, Verdict, place_words

NUM_STEPS = 64
FORMAT = 2
MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """What one rank's board said. `stamps`: of the last NUM_STEPS steps, oldest first."""

    run: str
    rank: int
    size: int
    pid: int
    host: str
    written_by: str
    monotonic_ns: int
    wall_ns: int
    state: State
    verdict: Verdict | None
    error: Verdict | None
    trace: str
    stamps: tuple[Stamp, ...]

    @property
    def last(self) -> Stamp | None:
        return self.stamps[-1] if self.stamps else None

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """Where the rank stood last; before all others when it never stamped."""
        return self.last.place if self.last is not None else (-1, 0, 0, False)

    @property
    def words(self) -> str:
        """Where the rank stood last, and for how long."""
        if self.last is None:
            return "was before its first step"
        where = place_words(self.last.step, self.last.phase, self.last.layer)
        doing = "waited" if self.last.waits else "was"
        return f"{doing} {where}, for {(self.monotonic_ns - self.last.ns) / 1e9:.3f} s"


def flight_path(directory: Path, rank: int) -> Path:
    """Where the record of `rank` goes."""
    return directory / f"flight-rank{rank}.json"


def run_name(key: bytes) -> str:
    """The name of a run in its records: 16 hexadecimal digits that follow from the group's key and do not tell it."""
    return hashlib.blake2b(key, digest_size=8, person=b"serried run").hexdigest()


def read_board(board: Board, *, written_by: str, run: str = "") -> FlightRecord:
    """The record of what a board says now."""
    stamps = board.stamps()
    steps = sorted({stamp.step for stamp in stamps})[-NUM_STEPS:]
    return FlightRecord(
        run=run,
        rank=board.rank,
        size=board.size,
        pid=board.pid,
        host=socket.gethostname(),
        written_by=written_by,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        state=board.state,
        verdict=board.verdict,
        error=board.error,
        trace=board.trace,
        stamps=tuple(stamp for stamp in stamps if stamp.step >= steps[0]),
    )


def write_flight(record: FlightRecord, directory: Path) -> Path:
    """Write the file whole or not at all, in place of an older one; the path."""
    path = flight_path(directory, record.rank)
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(_to_json(record), separators=(",", ":")), "utf-8")
    unfinished.replace(path)
    return path


def leave_flight(board: Board, directory: Path | None, *, written_by: str, run: str = "") -> None:
    """Write the board's record at the very end, where a disk that is full may not change how it ends."""
    if directory is None:
        return
    try:
        write_flight(read_board(board, written_by=written_by, run=run), directory)
    except OSError as error:
        say(f"serried: rank {board.rank} left no flight record: {error}")


def last_words(verdict: Verdict, *, rank: int, directory: Path | None) -> str:
    """The one line with which a rank ends."""
    record = f"; flight record {flight_path(directory, rank)}" if directory is not None else ""
    return f"serried: {verdict} [rank {rank} ends{record}]"


def say(line: str) -> None:
    """A line on stderr, past every buffer and lock of the interpreter."""
    os.write(2, f"{line}\n".encode(errors="replace"))


def read_flight(path: Path) -> FlightRecord:
    """The record in a file. Raises ValueError naming the file when it is not one, OSError when it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not a flight record, for it is not JSON: {error}") from error
    if not isinstance(found, dict) or "format" not in found:
        raise ValueError(f"{path}: is not a flight record, for it has no format; a run with --flight-dir writes one")
    if found["format"] != FORMAT:
        raise ValueError(f"{path}: is a flight record of format {found['format']!r}; this program reads {FORMAT}")
    try:
        record = _from_json(found)
    except KeyError as error:
        raise ValueError(f"{path}: is not a whole flight record, for it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is not a flight record, for a field is wrong: {error}") from error
    if not 0 <= record.rank < record.size <= MOST_RANKS:
        raise ValueError(f"{path}: is of rank {record.rank} of {record.size}; a group has ranks 0 to size - 1")
    return record


def _to_json(record: FlightRecord) -> dict[str, Any]:
    steps = [
        {"step": step, "stamps": [[int(s.phase), s.layer, int(s.waits), s.ns] for s in stamps]}
        for step, stamps in groupby(record.stamps, key=lambda stamp: stamp.step)
    ]
    return {
        "format": FORMAT,
        "run": record.run,
        "rank": record.rank,
        "size": record.size,
        "pid": record.pid,
        "host": record.host,
        "written_by": record.written_by,
        "monotonic_ns": record.monotonic_ns,
        "wall_ns": record.wall_ns,
        "state": record.state.name,
        "verdict": _verdict_to_json(record.verdict),
        "error": _verdict_to_json(record.error),
        "trace": record.trace,
        "phases": {int(phase): phase.name.lower() for phase in Phase},
        "steps": steps,
    }


def _from_json(found: Mapping[str, Any]) -> FlightRecord:
    return FlightRecord(
        run=str(found["run"]),
        rank=int(found["rank"]),
        size=int(found["size"]),
        pid=int(found["pid"]),
        host=str(found["host"]),
        written_by=str(found["written_by"]),
        monotonic_ns=int(found["monotonic_ns"]),
        wall_ns=int(found["wall_ns"]),
        state=State[found["state"]],
        verdict=_verdict_from_json(found["verdict"]),
        error=_verdict_from_json(found["error"]),
        trace=str(found["trace"]),
        stamps=tuple(_stamps_from_json(found["steps"])),
    )


def _stamps_from_json(steps: list[dict[str, Any]]) -> list[Stamp]:
    """Stamps are numbered anew, from 0; how many exchanges a step had begun is counted again."""
    stamps: list[Stamp] = []
    for step in steps:
        exchanges = 0
        for phase, layer, waits, ns in step["stamps"]:
            exchanges += phase in (Phase.DISPATCH, Phase.COMBINE) and not waits
            stamps.append(Stamp(len(stamps), ns, step["step"], Phase(phase), layer, exchanges, waits=bool(waits)))
    return stamps


def _verdict_to_json(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "culprit": verdict.culprit,
        "reason": verdict.reason.name,
        "cause": verdict.cause,
        "step": verdict.step,
        "phase": verdict.phase.name,
        "layer": verdict.layer,
    }


def _verdict_from_json(found: Mapping[str, Any] | None) -> Verdict | None:
    if found is None:
        return None
    return Verdict(
        culprit=int(found["culprit"]),
        reason=Reason[found["reason"]],
        cause=str(found["cause"]),
        step=int(found["step"]),
        phase=Phase[found["phase"]],
        layer=int(found["layer"]),
    )
