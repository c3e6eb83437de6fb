"""What the flight records of a group say together: who stopped first, and in which phase.

Pure once the files are read; see `flight` for what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .flight import FlightRecord, read_flight
from .verdict import BEFORE_STEPS, Phase, Verdict, place_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer.

    first                rank that stopped first: the verdict's, or else the one behind all others in the program
    step, phase, layer   where it stood, as in a verdict
    verdict              what the pulses found, None when no record has one
    agreed               every record has the same verdict
    missing              ranks that left no record
    lines                all of it for people, the answer first
    """

    first: int
    step: int
    phase: Phase
    layer: int
    verdict: Verdict | None
    agreed: bool
    missing: tuple[int, ...]
    lines: tuple[str, ...]


def diagnose(paths: Sequence[Path]) -> Diagnosis:
    """Read the flight files of a group and say what they mean.

    Raises ValueError for files that are not flight records, or not of one group; OSError for those that cannot be read.
    """
    if not paths:
        raise ValueError("flight files: none were given; each rank leaves one, for example flight-rank0.json")
    return diagnose_records([read_flight(path) for path in paths])


def diagnose_records(found: Iterable[FlightRecord]) -> Diagnosis:
    """The same from records, at least one."""
    records = _by_rank(list(found))
    verdicts = [record.verdict for record in records.values() if record.verdict is not None]
    verdict = max(verdicts, key=verdicts.count) if verdicts else None
    first = verdict.culprit if verdict is not None else min(records, key=lambda rank: (records[rank].place, rank))
    step, phase, layer = _where(records.get(first), verdict)
    size = next(iter(records.values())).size
    missing = tuple(rank for rank in range(size) if rank not in records)
    answer = f"rank {first} stopped first, {place_words(step, phase, layer)}"
    return Diagnosis(
        first=first,
        step=step,
        phase=phase,
        layer=layer,
        verdict=verdict,
        agreed=len(verdicts) == len(records) and len(set(verdicts)) == 1,
        missing=missing,
        lines=(answer, *_details(records, verdict, missing)),
    )


def _by_rank(found: Sequence[FlightRecord]) -> dict[int, FlightRecord]:
    runs = sorted({record.run for record in found})
    if len(runs) > 1:
        raise ValueError(f"flight files: are of {len(runs)} runs ({', '.join(runs)}); give the files of one run")
    records: dict[int, FlightRecord] = {}
    for record in sorted(found, key=lambda record: record.rank):
        if record.rank in records:
            raise ValueError(f"flight files: two are of rank {record.rank}; give one for each rank")
        records[record.rank] = record
    sizes = sorted({record.size for record in records.values()})
    if len(sizes) > 1:
        raise ValueError(f"flight files: are of groups of {sizes} ranks; give the files of one group")
    return records


def _where(record: FlightRecord | None, verdict: Verdict | None) -> tuple[int, Phase, int]:
    """Where the rank stopped: by its own record, or by what the others knew of it."""
    if record is not None and record.last is not None:
        return record.last.step, record.last.phase, record.last.layer
    if verdict is not None:
        return verdict.step, verdict.phase, verdict.layer
    return BEFORE_STEPS, Phase.BETWEEN, 0


def _details(records: Mapping[int, FlightRecord], verdict: Verdict | None, missing: Sequence[int]) -> list[str]:
    lines = [f"the group's verdict: {verdict}"] if verdict is not None else ["the group came to no verdict"]
    for rank, record in records.items():
        by = "" if record.written_by == "rank" else f" (its {record.written_by} wrote this)"
        lines.append(f"rank {rank} {record.words}{by}")
    lines += [f"rank {rank} left no record" for rank in missing]
    for rank, record in records.items():
        lines += [f"rank {rank}: {line}" for line in record.trace.splitlines()]
    return lines
