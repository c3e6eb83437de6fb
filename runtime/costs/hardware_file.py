"""Writes a device's size and peaks to a file that `hardware.read_hardware` reads, and never over anything else.

A file's measured [costs] stay as they are, letter by letter; its [rates] are written anew, by `rates`. Does not know
where the numbers come from.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..weights.hardware import Hardware, read_hardware
from .rates import Rates, rates_text, read_rates

_TABLES = re.compile(r"^(?:#[^\n]*\n)*\[.*", re.MULTILINE | re.DOTALL)
"""From the comment over the first table's header to the end."""
_HEADER = re.compile(r"\[\[?([A-Za-z_]+)")
"""A table's first line. Lines of numbers begin with a name, so no list is taken for one."""


def check_target(path: Path, *, kind: str) -> None:
    """ValueError, or OSError, unless `path` may be written: a new file, or the profile of a device of this kind.

    kind   what the device's name begins with, such as "CPU": a profile of another device is not written over
    """
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.absolute().parent}; make it first")
        return
    try:
        found = read_hardware(path)
    except ValueError as error:
        raise ValueError(f"{path} exists and is no hardware profile, so it is left as it is ({error})") from error
    if not found.name.startswith(kind):
        raise ValueError(f"{path} is the profile of {found.name}, not of a {kind}, so it is left as it is")


def write_hardware(
    path: Path, hardware: Hardware, *, kind: str, comment: Sequence[str], rates: Rates | None = None
) -> None:
    """Write the file whole or not at all, with `comment` on top. Raises as `check_target` does.

    rates   take the place of those in the file; None: they stay. Exchanges that were measured stay either way, if
            the new ones have none
    """
    check_target(path, kind=kind)
    path = path.resolve()  # what a link points to is written, not the link
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    found = read_rates(path) if path.exists() else None
    kept = replace(rates, exchange_us=rates.exchange_us or (found.exchange_us if found else ())) if rates else found
    tables = _TABLES.search(_without_rates(before))
    text = hardware_text(hardware, comment=comment) + (f"\n{tables[0].rstrip()}\n" if tables else "")
    text += f"\n{rates_text(kept)}" if kept else ""
    if tomllib.loads(text).get("costs") != tomllib.loads(before).get("costs"):
        raise ValueError(f"{path}: its costs are not written as [costs] tables and would be lost; write them so")
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _without_rates(text: str) -> str:
    """The file without its tables of rates, and without the comments right above each."""
    kept: list[str] = []
    in_rates = False
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            in_rates = header[1] == "rates"
            while in_rates and kept and kept[-1].startswith("#"):
                kept.pop()
        elif in_rates and line.startswith("#"):
            in_rates = False  # of the next table
        if not in_rates:
            kept.append(line)
    return "\n".join(kept) + "\n"


def hardware_text(hardware: Hardware, *, comment: Sequence[str]) -> str:
    """As TOML. Rates are rounded to three digits: nothing measured is more exact."""
    lines = [f"# {line}" for line in comment]
    for name, value in asdict(hardware).items():
        if name == "name":
            lines.append(f"name = {json.dumps(value)}")
        else:
            lines.append(f"{name} = {value:_}" if isinstance(value, int) else f"{name} = {_rounded(value)}")
    return "\n".join(lines) + "\n"


def _rounded(rate: float) -> str:
    """2.05e+11 as 205e9."""
    digits = float(f"{rate:.3g}")
    return f"{digits / 1e9:g}e9" if digits >= 1e9 else f"{digits!r}"
