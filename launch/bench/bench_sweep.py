"""`serried bench sweep`: throughput against speed for a user, over the number of requests at once. Measured.

    few requests at once     a user sees many tokens a second, a rank gives few
    many                     the other way round

One engine, one point after the other; the points that no other beats in both are the Pareto front. Other sizes of the
group, or settings of the engine, are other sweeps: their files of --output-json can be laid side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.bench.workload import Workload

from ..command.wide_table import print_table
from ..groups.group import Start
from .bench_result import figures
from .bench_run import BenchFlags, bench_of
from .bench_tables import heading, last_line, prediction_lines, table_of
from .bench_throughput import DONE, FAILED, keep
from .svg import front

ABOUT = """\
Measure throughput per GPU against tokens/s per user, over the number of requests at once.

Examples:
  serried bench sweep profiles/models/tiny-v3 --ranks 4 --concurrency 1 4 16 64 --report sweep.html
  serried bench sweep MODEL --ranks 2 --decode-only --input-len 1024 --output-len 32 --concurrency 8 32 128

Each point runs --waves times as many requests as it has at once.
"""


COLUMNS = ("at once", "tok/s per GPU", "tok/s per user", "TTFT ms", "TPOT ms", "step ms", "predicted", "front")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFlags(BenchFlags):
    """What `serried bench sweep` is told."""

    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    """Requests at once, over all ranks: a point each."""

    waves: int = 2
    """Requests of a point, over its requests at once."""

    input_len: int = 32
    """Tokens of a prompt."""

    output_len: int = 64
    """Tokens that a request gets."""

    def __post_init__(self) -> None:
        BenchFlags.__post_init__(self)
        if self.compare is not None:
            raise ValueError("compare is of `bench throughput`; a sweep has many points: compare one of them there")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be numbers of at least 1, e.g. 1 4 16")
        if self.waves < 1:
            raise ValueError(f"waves is {self.waves}; it must be at least 1, e.g. 2")
        self.loads  # noqa: B018  # it refuses lengths that make no sense

    @property
    def loads(self) -> tuple[Workload, ...]:
        """The points, by requests at once."""
        base = Workload(input_len=self.input_len, output_len=self.output_len)
        points = sorted(set(self.concurrency))
        return tuple([replace(base, num_prompts=self.waves * each, max_concurrency=each) for each in points])


def run(flags: SweepFlags, start: Start) -> int:
    """Measure and print on rank 0; returns 0, or 1 when a request failed. Raises Refusal for what cannot run."""
    with bench_of(flags, flags.loads, start) as bench:
        if bench is None:
            return DONE
        points = []
        for number, load in enumerate(flags.loads):
            bench.warm_up(load)
            points.append(figures(bench, [bench.measure(load, number=number)]))
    tell(points)
    short = {"points": [json.loads(last_line(point)) for point in points]}
    keep(flags, points, saved={"points": points}, line=json.dumps(short))
    return FAILED if any(point["failed"] for point in points) else DONE


def tell(points: Sequence[dict[str, Any]]) -> None:
    """Print the settings of the last point, and a line a point."""
    out = Console(highlight=False, soft_wrap=True)
    for line in heading(points[-1]):
        out.print(line, markup=False)
    print_table(out, sweep_table(points))
    for line in prediction_lines(points[-1]["prediction"]):
        out.print(line, markup=False)


def sweep_table(points: Sequence[dict[str, Any]]) -> Table:
    """A star at the points of the front."""
    best = pareto(points)
    table = table_of(
        "at once", "tok/s per GPU", "tok/s per user", "TTFT ms", "TPOT ms", "step ms", "predicted", "front"
    )
    for place, point in enumerate(points):
        steady, step_ms, prediction = point["steady"] or {}, point["steps"]["step_ms"], point["prediction"]
        table.add_row(
            str(point["settings"]["max_concurrency"]),
            f"{steady.get('output_throughput_per_gpu', point['output_throughput_per_gpu']):.1f}",
            _number(steady.get("tokens_per_s_per_user")),
            _number(point["median_ttft_ms"]),
            _number(point["mean_tpot_ms"]),
            _number(step_ms and step_ms["median"]),
            _number(prediction and prediction["predicted_step_ms"]),
            "*" if place in best else "",
        )
    return table


def pareto(points: Sequence[dict[str, Any]]) -> set[int]:
    """Places of the points that no other beats in both; one without a steady part is none."""
    found = {
        str(place): (point["steady"]["tokens_per_s_per_user"], point["steady"]["output_throughput_per_gpu"])
        for place, point in enumerate(points)
        if point["steady"]
    }
    return {int(place) for place in front(found)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
