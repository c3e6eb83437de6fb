"""`serried doctor`: who stopped first, where, and what the others waited for, from the flight records of a group.

Reads files and says what is in them; the judgement is `runtime.failure.diagnosis`, the picture `last_steps`. Without
files it looks at the machine and the group instead: `first_contact`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console

from runtime.failure.diagnosis import Diagnosis, diagnose_records
from runtime.failure.flight import FlightRecord, read_flight
from runtime.failure.verdict import Phase, place_words

from ..groups.group import Start
from ..groups.refusal import refusals
from .first_contact import ContactFlags, look_around
from .last_steps import Picture, join_ranks

ABOUT = """\
Without files: look at this machine, or at a whole group under any launcher, and say what will not work, what that means
and what to try. Takes under two minutes.
With flight records: say which rank of a failed group stopped first, and where.

Examples:
  serried doctor
  serried doctor --ranks 4 --device cpu
  torchrun --standalone --nproc-per-node 8 -m launch doctor
  serried generate MODEL_FOLDER --ranks 4 --prompts requests.jsonl --flight-dir flight
  serried doctor flight
  serried doctor flight/flight-rank0.json flight/flight-rank3.json --steps 8

The exit code is 1 when a check failed, or when the answer is not certain: the records do not agree or hold no verdict.
Of a folder with records of several runs the newest run counts.
"""

DONE, FAILED = 0, 1
PATTERN = "flight-rank*.json"
FAR_APART_S = 60.0
"""A group ends within seconds; records that were written further apart are hardly of one run."""

AWAITED = {
    Phase.VOTE: "the vote",
    Phase.DISPATCH: "the tokens",
    Phase.COMBINE: "the experts' answers",
    Phase.MIGRATE: "the experts' weights",
}
"""What a rank that waits in a phase waits for; in others nobody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """What `serried doctor` is told."""

    flight_files: tuple[Path, ...]
    """Flight records of one group, or the folder they are in (--flight-dir of the run); none: look at the machine."""

    steps: int = 3
    """Steps that the timeline shows, the last ones."""

    contact: tyro.conf.OmitArgPrefixes[ContactFlags] = field(default_factory=ContactFlags)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, e.g. 3")


def run(flags: DoctorFlags, start: Start) -> int:
    """Print the answer; returns 1 when it is not certain. Raises Refusal for files that are no flight records."""
    if not flags.flight_files:
        return look_around(flags.contact, start)
    with refusals():
        found = [read_flight(path) for path in find_files(flags.flight_files)]
        found, older = newest_run(found) if all(path.is_dir() for path in flags.flight_files) else (found, [])
        diagnosis = diagnose_records(found)
    records = {record.rank: record for record in found}
    out = Console(highlight=False, soft_wrap=True)
    if older:
        ranks = join_ranks(sorted({record.rank for record in older}))
        out.print(f"left out: the records that {ranks} of older runs left there", markup=False)
    doubts = find_doubts(diagnosis, records)
    for line in report(diagnosis, records, doubts, steps=flags.steps):
        out.print(line, markup=False)
    return FAILED if doubts else DONE


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant: a folder stands for the records in it. Raises ValueError when it holds none."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: holds no {PATTERN}; give the folder that the run had as --flight-dir")
        files += inside
    return files


def newest_run(found: Sequence[FlightRecord]) -> tuple[list[FlightRecord], list[FlightRecord]]:
    """The records of the run that wrote last, and those of others: a smaller group leaves some of a larger one's."""
    newest = max(found, key=lambda record: record.wall_ns).run
    return [record for record in found if record.run == newest], [record for record in found if record.run != newest]


def report(
    diagnosis: Diagnosis, records: Mapping[int, FlightRecord], doubts: Sequence[str], *, steps: int
) -> list[str]:
    """The answer, what the others did, the picture, then all that the records say."""
    answer, *details = diagnosis.lines
    picture = Picture(records=records, first=diagnosis.first, steps=steps).lines()
    return [
        answer,
        *waiting_lines(diagnosis, records),
        *[f"not certain: {doubt}" for doubt in doubts],
        "",
        *picture,
        *([""] if picture else []),
        *details,
    ]


def waiting_lines(diagnosis: Diagnosis, records: Mapping[int, FlightRecord]) -> Iterator[str]:
    """A line for each place where others stood, the furthest behind first."""
    stood: dict[tuple[tuple[int, int, int, bool], str], list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank != diagnosis.first:
            stood.setdefault((record.place, _stand(record, diagnosis, records)), []).append(rank)
    for (_, words), ranks in sorted(stood.items()):
        yield f"{join_ranks(ranks)} {words}"


def _stand(record: FlightRecord, diagnosis: Diagnosis, records: Mapping[int, FlightRecord]) -> str:
    last = record.last
    if last is None:
        return "had no first step"
    where = place_words(last.step, last.phase, last.layer)
    if last.phase is Phase.IDLE:
        return "had nothing to do"
    if not last.waits:
        return f"worked {where}"
    first = records.get(diagnosis.first)
    ahead = first is None or record.place > first.place
    whose = f"rank {diagnosis.first}" if ahead else "the others"
    return f"waited {where}, for {AWAITED.get(last.phase, 'word')} of {whose}"


def find_doubts(diagnosis: Diagnosis, records: Mapping[int, FlightRecord]) -> list[str]:
    """Why the answer may be wrong; empty when it is certain."""
    doubts = []
    if diagnosis.verdict is None:
        doubts.append("no record has the group's verdict; the answer is the rank that was behind all others")
    elif not diagnosis.agreed:
        doubts.append("the records do not have the same verdict; the answer is the most common one")
    written = sorted([record.wall_ns for record in records.values()])
    apart_s = (written[-1] - written[0]) / 1e9
    if apart_s > FAR_APART_S:
        doubts.append(f"the records were written {apart_s:,.0f} s apart, so they may be of two runs")
    return doubts
