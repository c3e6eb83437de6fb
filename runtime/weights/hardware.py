"""A device's size and peaks, from a TOML file; numbers only, nothing is asked of the machine."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device: bytes, and per second operations and bytes at its peak. 0 where there is no such thing.

    multiprocessors   what kernels and exchanges share; may be left out of a file
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    fp8_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    multiprocessors: int = 0


ELSEWHERE = ("costs", "costs_like", "rates")
"""Parts of the file that others read: `cost_tables`, `device_costs`, `rates`."""


def read_hardware(path: Path | str) -> Hardware:
    """Read a file such as profiles/hardware/h200.toml. ValueError names a missing, unknown or negative field."""
    path = Path(path)
    data = _read(path)
    for name in ELSEWHERE:
        data.pop(name, None)
    names = [field.name for field in fields(Hardware)]
    for name in data:
        if name not in names:
            raise ValueError(f"{path}: {name} is unknown; the fields are {', '.join(names)}")
    data.setdefault("multiprocessors", 0)
    for name in names:
        if name not in data:
            raise ValueError(f"{path}: {name} is missing; the fields are {', '.join(names)}")
        if name != "name" and not (isinstance(data[name], int | float) and data[name] >= 0):
            raise ValueError(f"{path}: {name} is {data[name]!r}; it must be a number of at least 0")
    return Hardware(**data)


def costs_like(path: Path | str) -> str | None:
    """The device whose measured tables stand for this one's, scaled; None where the file names none."""
    name = _read(Path(path)).get("costs_like")
    if name is not None and not (isinstance(name, str) and name.replace("-", "").isalnum()):
        raise ValueError(f"{path}: costs_like is {name!r}; it must be a name in the same folder, e.g. h200")
    return name


def has_costs(path: Path | str) -> bool:
    """Whether the file has measured tables."""
    return "costs" in _read(Path(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
