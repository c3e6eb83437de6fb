"""What has changed between two results of a benchmark, and whether that is more than noise.

    difference   of the headline figures
    noise        twice the root of the sum of both squared standard errors: what two equal engines may differ by in 95
                 of 100 comparisons, if the noise is of the kind that was measured

Settings that differ are named first: then the figures answer another question. Pure; knows results as dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from runtime.model.json_file import parse_json

from .bench_result import HEADLINES, headline
from .bench_tables import table_of

SIGMAS = 2.0
SAME_MACHINE = ("processor", "cores", "gpu", "torch", "threads_per_rank")


def read_result(path: Path) -> dict[str, Any]:
    """A file of --output-json. ValueError where it is none, OSError where it is not there."""
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"compare is {str(path)!r}, which is no JSON: {error}") from error
    try:  # what can be compared with itself will be compared with the run, whoever has written it
        comparison_table(comparison(found, found))
        comparison_notes(found, found)
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"compare is {str(path)!r}; it must be a file of `serried bench throughput --output-json`"
        ) from error
    return found


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings, and parts of the machine, that are not the same in both, in words; of those that one of them does not
    name, as an older program's result may not, the names."""
    lines = []
    for part, names in (
        ("settings", sorted(set(old["settings"]) & set(new["settings"]))),
        ("environment", SAME_MACHINE),
    ):
        for name in names:
            before, after = old[part].get(name), new[part].get(name)
            if before != after:
                lines.append(f"{name} was {before}, is {after}")
    unknown = sorted(set(old["settings"]) ^ set(new["settings"]))
    return lines + ([f"only one of them says: {', '.join(unknown)}"] if unknown else [])


def comparison(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each headline that both have: values, change, noise, and a word on it."""
    before, after = headline(dict(old)), headline(dict(new))
    rows = []
    for name, more_is_better in HEADLINES.items():
        was, now = before[name], after[name]
        if was is None or now is None:
            continue
        noise = noise_of(old, new, name)
        rows.append({
            "name": name,
            "old": was,
            "new": now,
            "change": (now - was) / was if was else None,
            "noise": noise,
            "verdict": verdict(now - was, noise, more_is_better=more_is_better),
        })  # fmt: skip
    return rows


def noise_of(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> float | None:
    """What the difference may be without meaning anything; None where one of the runs does not know its noise."""
    errors = [run["noise"]["errors"].get(name) for run in (old, new)]
    return None if None in errors else SIGMAS * math.hypot(*errors)


def verdict(difference: float, noise: float | None, *, more_is_better: bool) -> str:
    """A word on a difference."""
    if noise is None:
        return "noise unknown"
    if abs(difference) <= noise:
        return "within noise"
    return "better" if (difference > 0) == more_is_better else "worse"


def comparison_table(rows: list[dict[str, Any]]) -> Table:
    """For a terminal."""
    table = table_of("compared", "before", "now", "change", "noise", "")
    for row in rows:
        change = "-" if row["change"] is None else f"{row['change']:+.1%}"
        noise = "-" if row["noise"] is None or not row["old"] else f"+-{row['noise'] / abs(row['old']):.1%}"
        table.add_row(row["name"], f"{row['old']:.3f}", f"{row['new']:.3f}", change, noise, row["verdict"])
    return table


def comparison_notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What to know before the table is believed."""
    lines = [f"not alike: {line}" for line in differing(old, new)]
    hashes = old.get("token_hash"), new.get("token_hash")
    lines.append("tokens are the same" if hashes[0] == hashes[1] else f"tokens differ: {hashes[0]} and {hashes[1]}")
    if any(run["noise"]["source"] == "within one run" for run in (old, new)):
        lines.append("noise from run to run is unknown: --repeats 3, or more, measures it")
    return lines
