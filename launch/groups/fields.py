"""What must be the same on every rank before they decode together, as names and values; and who differs in what.

Knows versions, files and flags; does not know how the ranks exchange them (see `meeting`). The folder of the model may
have another path on every node; what is in it may not differ.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .house import ROOMS, home

Fields = tuple[tuple[str, str], ...]
"""Names and values, in the order in which a difference is reported: what may cause others comes first."""

ABSENT = "nothing"
SAMPLES, SAMPLE_BYTES = 64, 512
"""What is compared of each weight file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The ranks disagree on `field`; `values` holds each value with the ranks that have it, the most common first."""

    field: str
    values: tuple[tuple[str, tuple[int, ...]], ...]

    def __str__(self) -> str:
        said = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in self.values)
        return f"ranks differ in {self.field}: {said}; it must be the same on all"


class RanksDiffer(ValueError):
    """Raised on every rank, before any weight is read."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


def first_difference(rows: Sequence[Fields]) -> Difference | None:
    """`rows` in rank order. Fields are compared in rank 0's order, then those that it does not have."""
    tables = [dict(row) for row in rows]
    for name in dict.fromkeys(name for row in rows for name, _ in row):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            ranks_by_value.setdefault(table.get(name, ABSENT), []).append(rank)
        if len(ranks_by_value) > 1:
            by_size = sorted(ranks_by_value.items(), key=lambda item: (-len(item[1]), item[1]))
            return Difference(field=name, values=tuple((value, tuple(ranks)) for value, ranks in by_size))
    return None


def version_fields(packages: Iterable[str] = ("torch",)) -> Fields:
    """Versions of Python, serried and `packages`, and the source of serried itself."""
    names = (*packages, "serried")
    versions = tuple((f"the version of {name}", _version(name)) for name in names)
    return (("the version of python", platform.python_version()), *versions, ("the source of serried", _source()))


def model_fields(model: Path) -> Fields:
    """The model's config.json, and its weight files: names, sizes, and samples of what is in them.

    Two checkpoints of one shape have equal headers and sizes, so that samples are needed to tell them apart. `model` is
    a folder or a config.json.
    """
    config = model if model.is_file() else model / "config.json"
    files = sorted(config.parent.glob("*.safetensors"))
    listed = "\n".join(f"{file.name} {file.stat().st_size}" for file in files)
    index = config.with_name("model.safetensors.index.json")
    return (
        ("the model's config.json", _digest(config.read_bytes()) if config.exists() else ABSENT),
        ("the model's index of weights", _digest(index.read_bytes()) if index.exists() else ABSENT),
        ("the model's weight files", _digest(listed.encode()) if listed else ABSENT),
        ("the model's weights", _digest(b"".join(map(_sample, files))) if files else ABSENT),
    )


def _sample(file: Path) -> bytes:
    """SAMPLES pieces of a file, spread evenly."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        pieces = []
        for number in range(SAMPLES):
            stream.seek(number * max(size - SAMPLE_BYTES, 0) // max(SAMPLES - 1, 1))
            pieces.append(stream.read(SAMPLE_BYTES))
    return b"".join(pieces)


def config_fields(config: Any) -> Fields:
    """The flags that set `config`, a dataclass that may hold others. `model` is left out: see `model_fields`."""
    found: list[tuple[str, str]] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            found += config_fields(value)
        elif item.name != "model":
            found.append((f"--{item.name.replace('_', '-')}", str(value)))
    return tuple(found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def _source() -> str:
    """Over all the rooms' files: what counts in a checkout, where the version stays the same."""
    digest = hashlib.sha256()
    for file in sorted(path for room in ROOMS for path in (home() / room).rglob("*.py")):
        digest.update(f"{file.relative_to(home())} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 0-2 and 5" """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
