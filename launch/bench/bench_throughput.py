"""`serried bench throughput`: an engine under a load, from the first prompt to the last token. Measured.

Prints the question, the machine, the commit, the settings, tables, then one last line of JSON, unless --output-json
says where else the figures go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tyro
from rich.console import Console

from runtime.bench.workload import Workload

from ..command.wide_table import print_table
from ..groups.group import Start
from ..groups.refusal import refusals
from .bench_compare import comparison, comparison_notes, comparison_table, read_result
from .bench_result import figures
from .bench_run import BenchFlags, bench_of
from .bench_tables import last_line, tell
from .report_page import write_page

ABOUT = """\
Measure throughput and latency of an engine under a load, and where the time of its steps goes.

Examples:
  serried bench throughput profiles/models/tiny-v3 --ranks 4 --num-prompts 64 --report report.html
  serried bench throughput MODEL --num-prompts 256 --max-concurrency 64 --output-json now.json --compare before.json
  serried bench throughput MODEL --request-rate 4 --burstiness 0.5 --input-len 512 --output-len 128
  serried bench throughput deepseek-v2-lite --load-format dummy --decode-only --input-len 2048 --max-concurrency 32
  torchrun --nproc-per-node 8 -m launch bench throughput MODEL --num-prompts 2048

The steady part goes from the first to the last moment at which at least 90% of the most requests that ever decode at
once do: it leaves out ramp and tail. Step times are of its steps that only decode. GPU stands for a rank's device, also
where that is a core.
"""

DONE, FAILED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputFlags(BenchFlags):
    """What `serried bench throughput` is told."""

    load: tyro.conf.OmitArgPrefixes[Workload] = field(default_factory=Workload)

    repeats: int = 1
    """Runs, each with prompts of its own; the median one is shown. From 3 on the noise between runs is known."""

    def __post_init__(self) -> None:
        BenchFlags.__post_init__(self)
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; it must be at least 1, e.g. 3")


def run(flags: ThroughputFlags, start: Start) -> int:
    """Measure and print on rank 0; returns 0, or 1 when a request failed. Raises Refusal for what cannot run."""
    earlier = earlier_result(flags)
    with bench_of(flags, [flags.load], start) as bench:
        if bench is None:
            return DONE
        bench.warm_up(flags.load)
        found = figures(bench, [bench.measure(flags.load, number=number) for number in range(flags.repeats)])
    return conclude(found, flags, earlier)


def earlier_result(flags: BenchFlags) -> Mapping[str, Any] | None:
    """What --compare names, read before anything runs; None without it. Raises Refusal for what is no result."""
    with refusals():
        return read_result(flags.compare) if flags.compare is not None else None


def conclude(found: dict[str, Any], flags: BenchFlags, earlier: Mapping[str, Any] | None) -> int:
    """Save, compare, report and print; the exit code."""
    out = Console(highlight=False, soft_wrap=True)
    if earlier is not None:
        for line in comparison_notes(earlier, found):
            out.print(line, markup=False)
        print_table(out, comparison_table(comparison(earlier, found)))
    tell(found, out)
    keep(flags, [found], saved=found, line=last_line(found))
    return FAILED if found["failed"] else DONE


def keep(flags: BenchFlags, points: Sequence[Mapping[str, Any]], *, saved: Mapping[str, Any], line: str) -> None:
    """The figures in their file, or else as a last line of JSON, and the page. Raises Refusal for what cannot be
    written; says on standard error where things are, for standard output ends with the line."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with refusals():
        if flags.output_json is None:
            print(line)
        else:
            flags.output_json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            notes.print(f"figures: {flags.output_json.absolute()}", markup=False)
        if flags.report is not None:
            write_page(flags.report, points)
            notes.print(f"report: {flags.report.absolute()}", markup=False)
