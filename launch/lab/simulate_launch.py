"""`serried simulate launch`: a step launched kernel by kernel and as one graph, as its kernels become shorter.

Nothing is run: the queue between host and device is played with given times (`runtime.costs.launches`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.costs.launches import LaunchCosts, Played, play_eager, play_graph

from ..command.wide_table import print_table
from ..groups.refusal import refusals

ABOUT = """\
Play a step that the host launches kernel by kernel, and as one captured graph, as its kernels become shorter.

Examples:
  serried simulate launch
  serried simulate launch --layers 61 --kernels 20 --launch-us 4
  serried simulate launch --step-ms 5 --json

A decode step has layers x kernels of them. With many tokens kernels are long and the host is far ahead; with few, the
device waits for the host, and more GPUs make it worse: each has less to do and as much to launch.
"""

DONE = 0
SHRINK = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
_DRAWN, _COLUMNS = 12, 64
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """What `serried simulate launch` is told."""

    layers: int = 61
    """Layers of the model."""

    kernels: int = 18
    """Kernels of a layer."""

    step_ms: float = 40.0
    """What the longest step's kernels take in all; the following rows have ever shorter ones."""

    costs: tyro.conf.OmitArgPrefixes[LaunchCosts] = field(default_factory=LaunchCosts)

    json: Switch = False
    """End with one JSON object."""

    def __post_init__(self) -> None:
        for name, most in (("layers", 1000), ("kernels", 1000)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 1 to {most}, e.g. 20")
        if not 0 < self.step_ms <= 10_000:
            raise ValueError(f"step_ms is {self.step_ms}; it must be above 0 and at most 10000, e.g. 40")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One length of kernels; microseconds a step."""

    kernel_us: float
    eager: Played
    graph: Played

    @property
    def gain(self) -> float:
        """Steps a second of the graph over those launched one by one, less 1."""
        return self.eager.total_us / self.graph.total_us - 1.0


def run(flags: LaunchFlags) -> int:
    """Play and print; returns 0."""
    with refusals():
        rows = play(flags)
    out = Console(highlight=False, soft_wrap=True)
    number = flags.layers * flags.kernels
    out.print(
        f"{flags.layers} layers x {flags.kernels} kernels = {number:,} launches a step, {flags.costs.launch_us:g} us "
        "each: "
        f"the host alone needs {number * flags.costs.launch_us / 1e3:.1f} ms; a graph is launched in "
        f"{flags.costs.graph_us:g} us",
        markup=False,
    )
    print_table(out, launch_table(rows))
    short = next((row for row in rows if row.eager.busy < 0.6), rows[-1])
    for line in drawing(short):
        out.print(line, markup=False)
    out.print(verdict(flags, rows), markup=False)
    if flags.json:
        print(json.dumps([record(row) for row in rows]))
    return DONE


def play(flags: LaunchFlags) -> list[Row]:
    """A row for each length."""
    number = flags.layers * flags.kernels
    longest_us = 1e3 * flags.step_ms / number
    return [
        Row(
            kernel_us=share * longest_us,
            eager=play_eager([share * longest_us] * number, flags.costs),
            graph=play_graph([share * longest_us] * number, flags.costs),
        )
        for share in SHRINK
    ]


def launch_table(rows: list[Row]) -> Table:
    """Milliseconds a step."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("kernel us", "eager ms", "device busy", "graph ms", "device busy", "gain"):
        table.add_column(f"  {name}", justify="right")
    for row in rows:
        eager, graph = ((f"{each.total_us / 1e3:.2f}", f"{each.busy:.0%}") for each in (row.eager, row.graph))
        table.add_row(f"{row.kernel_us:.2f}", *eager, *graph, f"{row.gain:+.0%}")
    return table


def drawing(row: Row) -> list[str]:
    """The first kernels, eager above and the graph below; a launch is l, a kernel #, waiting a dot."""
    end_us = max(row.eager.spans[:_DRAWN][-1].run_us[1], row.graph.spans[:_DRAWN][-1].run_us[1])
    lines = [f"the first {len(row.eager.spans[:_DRAWN])} kernels of {row.kernel_us:.1f} us, {end_us:.0f} us:"]
    for name, played in (("eager", row.eager), ("graph", row.graph)):
        spans = played.spans[:_DRAWN]
        launches = list(dict.fromkeys([span.launch_us for span in spans]))
        lines.append(f"{name}  host    {_drawn(launches, end_us, 'l')}")
        lines.append(f"       device  {_drawn([span.run_us for span in spans], end_us, '#')}")
    return lines


def verdict(flags: LaunchFlags, rows: list[Row]) -> str:
    """Where the host begins to be what a step waits for."""
    bound = [row for row in rows if row.eager.busy < 0.9]
    if not bound:
        return "The host keeps up with all of these: a graph gains little."
    return (
        f"From kernels of {bound[0].kernel_us:.1f} us on the device waits for launches: a step never takes less than "
        f"{flags.layers * flags.kernels * flags.costs.launch_us / 1e3:.1f} ms without a graph, however short they are."
    )


def record(row: Row) -> dict[str, Any]:
    """For a program."""
    return {
        "kernel_us": round(row.kernel_us, 4),
        "eager_us": round(row.eager.total_us, 2),
        "eager_busy": round(row.eager.busy, 4),
        "graph_us": round(row.graph.total_us, 2),
        "graph_busy": round(row.graph.busy, 4),
        "gain": round(row.gain, 4),
    }


def _drawn(spans: list[tuple[float, float]], end_us: float, glyph: str) -> str:
    """Every other span in another letter, so that neighbours are told apart."""
    cells = ["."] * _COLUMNS
    for place, (begin_us, stop_us) in enumerate(spans):
        begin, stop = round(begin_us / end_us * _COLUMNS), round(stop_us / end_us * _COLUMNS)
        for column in range(begin, min(max(stop, begin + 1), _COLUMNS)):
            cells[column] = glyph if place % 2 == 0 else {"l": "L", "#": "="}[glyph]
    return "".join(cells)
