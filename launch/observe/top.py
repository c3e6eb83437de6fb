"""`serried top`: the ranks of this machine's groups, live: what each has to do, and whom the others wait for.

Reads the pages that ranks write (`runtime.loop.show_page`) and asks nobody: a rank that hangs or is stopped is shown as
such, and of a group that has failed it is said who did, until the next one starts.
Knows pages and how to lay them out; decides nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime.loop.show_page import PageState, Shown, folded

from ..groups.refusal import refusals
from ..groups.run_folder import base_folder, check_own, read_runs

ABOUT = """\
Watch the ranks of running groups: tokens, cache, queues, where they wait, and how level their experts are.

Examples:
  serried top
  serried top --once
  serried top --json --interval 10 >> load.jsonl

Shows the groups of this user on this machine; ranks of other machines are seen there (ssh HOST serried top --once).
Ends with Ctrl-C; --once ends with 1 where no group runs. A group that failed is shown until another one starts.
"""

DONE, NOTHING = 0, 1
ONCE_S = 0.25
"""Between the two looks from which --once takes rates."""
STALE_S = 5.0
"""A rank that steps and has not ended a step for so long is shown as late."""
HEAT = "▁▂▃▄▅▆▇█"
STRIP_COLUMNS = 64
COLUMNS = ("rank", "state", "tok/s", "run", "wait", "cache", "step", "own", "exch", "beat", "pre", "slow")
LEGEND = """\
run, wait: requests; cache: pages held; pre: preempted; slow: steps that others waited for it without cause
step: ms of the last one; of them own work, waiting for rows (exch), waiting for votes (beat)"""
ALARMS = ("stopped", "gone", "late", "raised", "silent", "stuck", "lost")
NARROW = 110
"""Columns where the output is no terminal."""

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopFlags:
    """What `serried top` is told."""

    once: Switch = False
    """Look once, print, and end."""

    json: Switch = False
    """A line of JSON for each look instead of tables."""

    interval: float = 1.0
    """Seconds between two looks."""

    run_dir: Path | None = None
    """Folder that the groups were started with; unset: this user's own."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.interval <= 3600:
            raise ValueError(f"interval is {self.interval}; it must be from 0.05 to 3600 seconds, e.g. 1")


def run(flags: TopFlags) -> int:
    """Look until Ctrl-C, or once; the exit code. Raises Refusal for a folder that is somebody else's."""
    base = base_folder(os.environ, flags.run_dir)
    with refusals():
        if base.exists():
            check_own(base)
    looks = Looks(base)
    if flags.once:
        looks.look()
        time.sleep(ONCE_S)
        groups = looks.look()
        say(groups, as_json=flags.json)
        return DONE if any(group["failed"] is None for group in groups) else NOTHING
    if flags.json:
        while True:
            say(looks.look(), as_json=True)
            time.sleep(flags.interval)
    with Live(console=Console(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(picture(looks.look()), refresh=True)
            time.sleep(flags.interval)


def say(groups: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print one look."""
    if as_json:
        print(json.dumps({"time": time.time(), "groups": groups}), flush=True)
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(picture(groups), width=None if console.is_terminal else NARROW)


class Looks:
    """One look after the other at the groups of a folder; rates are taken from one to the next."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._before: dict[tuple[str, int], Shown] = {}

    def look(self) -> list[dict[str, Any]]:
        """Every group as plain values."""
        runs = read_runs(self._base)
        now_ns = time.monotonic_ns()
        groups = [
            group_values(name, pages, [self._before.get((name, page.words["rank"])) for page in pages], now_ns=now_ns)
            for name, pages in runs.items()
        ]
        self._before = {(name, page.words["rank"]): page for name, pages in runs.items() for page in pages}
        return groups


def group_values(name: str, pages: Sequence[Shown], before: Sequence[Shown | None], *, now_ns: int) -> dict[str, Any]:
    """A group: its ranks, and what concerns all of them, from the rank here that has come farthest."""
    ranks = [rank_values(page, early, now_ns=now_ns) for page, early in zip(pages, before, strict=True)]
    first = max(pages, key=lambda page: page.words["steps"])
    words = first.words
    early = next((page for page in before if page and page.words["rank"] == words["rank"]), None)
    return {
        "run": name,
        "ranks_of_group": words["size"],
        "ranks": ranks,
        "step": words["step"],
        "tokens_per_s": sum([rank["tokens_per_s"] or 0.0 for rank in ranks]),
        "expert_balance": _level(words, early.words if early else None),
        "prefill_interval": words["prefill_interval"] or "auto",
        "deferred_steps": words["deferred_steps"],
        "steps": words["steps"],
        "cut_steps": words["cut_steps"],
        "rerun_steps": words["rerun_steps"],
        "rebalances": words["rebalances"],
        "heat": group_heat(pages),
        "notes": sorted({page.note for page in pages if page.note and page.culprit is None}),
        "failed": next((page.note for page in pages if page.culprit is not None), None),
        "warnings": warnings_of(ranks),
    }


def rank_values(page: Shown, before: Shown | None, *, now_ns: int) -> dict[str, Any]:
    """A rank; rates since the look before, None where there was none."""
    words = page.words
    rate = None
    if before is not None and words["beat_ns"] > before.words["beat_ns"] > 0:
        grown = words["generated_tokens"] - before.words["generated_tokens"]
        rate = grown * 1e9 / (words["beat_ns"] - before.words["beat_ns"])
    return {
        "rank": words["rank"],
        "pid": words["pid"],
        "state": state_word(page, now_ns=now_ns),
        "since_step_s": max(now_ns - words["beat_ns"], 0) / 1e9 if words["beat_ns"] else None,
        "tokens_per_s": 0.0 if rate is None and before is not None else rate,
        "running": words["running"],
        "waiting": words["waiting"],
        "cache_used": 1.0 - words["free_pages"] / words["pages"] if words["pages"] else 0.0,
        "step_ms": words["step_us"] / 1000,
        "own_ms": words["own_us"] / 1000,
        "exchange_ms": words["exchange_us"] / 1000,
        "beat_ms": words["beat_us"] / 1000,
        "generated_tokens": words["generated_tokens"],
        "computed_tokens": words["computed_tokens"],
        "finished": words["finished"],
        "preemptions": words["preemptions"],
        "overflow_steps": words["overflow_steps"],
        "slow_steps": words["slow_steps"],
        "degraded": bool(words["degraded"]),
    }


def state_word(page: Shown, *, now_ns: int) -> str:
    """In a word: a verdict of the group goes before what the system says of the process, and that before the rank's."""
    if page.culprit is not None:
        return page.reason if page.culprit == page.words["rank"] else "ended"
    if page.process != "running":
        return page.process
    if page.state is not PageState.STEPS:
        return page.state.name.lower()
    return "late" if now_ns - page.words["beat_ns"] > STALE_S * 1e9 else "steps"


def warnings_of(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """What somebody should look at."""
    lines = [f"rank {rank['rank']} is {rank['state']}" for rank in ranks if rank["state"] in ALARMS]
    lines += [f"rank {rank['rank']} is slow for long and gets no new requests" for rank in ranks if rank["degraded"]]
    full = [str(rank["rank"]) for rank in ranks if rank["waiting"] and rank["cache_used"] > 0.98]
    return lines + ([f"requests wait for cache on rank {', '.join(full)}"] if full else [])


def group_heat(pages: Sequence[Shown]) -> list[float]:
    """Load of experts over all ranks here, 1.0 for the hottest; each rank counts its own tokens."""
    lengths = {len(page.heat) for page in pages if page.heat}
    if len(lengths) != 1:
        return []
    sums = [sum(cells) for cells in zip(*[page.heat for page in pages if page.heat], strict=True)]
    return [round(cell / max(sums), 4) for cell in sums] if max(sums) else []


def _level(words: Any, before: Any) -> float | None:
    """Mean over max of the ranks' (token, expert) pairs since the look before; None without any."""
    base = before or {"mean_pairs": 0, "most_pairs": 0}
    most = words["most_pairs"] - base["most_pairs"]
    return min((words["mean_pairs"] - base["mean_pairs"]) / most, 1.0) if most > 0 else None


def picture(groups: Sequence[dict[str, Any]]) -> Group | Text:
    """All groups for a terminal."""
    if not groups:
        return Text("no group of this user runs here; start one, e.g. serried generate MODEL --ranks 4 ...")
    parts: list[Table | Text] = []
    for group in groups:
        parts += [Text(headline(group)), rank_table(group["ranks"]), *map(Text, closing(group))]
    return Group(*parts, Text(LEGEND))


def headline(group: dict[str, Any]) -> str:
    """A group in a line."""
    here = len(group["ranks"])
    elsewhere = group["ranks_of_group"] - here
    others = f", {elsewhere} elsewhere" if elsewhere else ""
    if group["failed"] is not None:
        return f"run {group['run']} has failed: {group['failed']}"
    return f"run {group['run']}: {here} ranks here{others}, step {group['step']}, {group['tokens_per_s']:.1f} tokens/s"


def rank_table(ranks: Sequence[dict[str, Any]]) -> Table:
    """A line a rank."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "state" else "right")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            rank["state"].upper() if rank["state"] in ALARMS else rank["state"],
            "-" if rank["tokens_per_s"] is None else f"{rank['tokens_per_s']:.1f}",
            str(rank["running"]),
            str(rank["waiting"]),
            f"{rank['cache_used']:.0%}",
            *[f"{rank[name]:.1f}" for name in ("step_ms", "own_ms", "exchange_ms", "beat_ms")],
            str(rank["preemptions"]),
            f"{rank['slow_steps']} DEGRADED" if rank["degraded"] else str(rank["slow_steps"]),
        )
    return table


def closing(group: dict[str, Any]) -> list[str]:
    """What concerns the whole group: experts, the beat of prompts, overlap, and what somebody should look at."""
    balance = "-" if group["expert_balance"] is None else f"{group['expert_balance']:.2f}"
    steps = max(group["steps"], 1)
    lines = [
        f"experts   balance over ranks {balance}, {group['rebalances']} rebalances",
        f"steps     prompts every {group['prefill_interval']} (put off in {group['deferred_steps']}), "
        f"in several tracks {group['cut_steps'] / steps:.0%}, run again {group['rerun_steps']}",
    ]
    if group["heat"]:
        lines.insert(1, f"load      {strip(group['heat'])}  (experts 0 to the last, full for the hottest)")
    lines += [f"WARNING   {line}" for line in group["warnings"]]
    return lines + [f"said      {line}" for line in group["notes"]]


def strip(heat: Sequence[float]) -> str:
    """A glyph a cell, or a few neighbours together: [0.0, 0.5, 1.0] is three blocks of rising height."""
    cells = folded([round(1000 * cell) for cell in heat], STRIP_COLUMNS)
    most = max(cells) or 1
    return "".join([HEAT[min(cell * len(HEAT) // most, len(HEAT) - 1)] for cell in cells])
