"""`serried bench kernels`: what one core of this machine reaches, and on request a hardware profile with it.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. Knows how it is
said; what is measured is `runtime.kernel_bench`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.hardware import Hardware
from runtime.hardware_file import check_target, write_hardware
from runtime.kernel_bench import Rate, Sizes, hardware_of, measure_kernels
from runtime.rate_bench import RateSizes, measure_rates
from runtime.rates import Rates

from .bench import commit, machine_line
from .bench_rates import KIND, rate_lines
from .refusal import refusals

ABOUT = """\
Measure what one core of this machine reaches: matrix products, memory, and the exchange among threads.
With --save also what the parts of a layer take, for the cost model.

Examples:
  serried bench kernels
  serried bench kernels --save profiles/hardware/cpu.toml

The numbers are the peaks that the cost model divides by; with --save it gets times of operations, which are closer.
It takes 3 to 8 seconds, and some 10 more with --save; CPU time leaves out waits and most of what else the machine does,
but cores share caches and memory, so an idle machine measures best.
"""

DONE = 0
DEVICE = f"{KIND}, one core"
QUESTION = "How many operations and bytes a second does one core of this machine reach (CPU time of one thread)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFlags:
    """What `serried bench kernels` is told."""

    save: Path | None = None
    """File to write as a hardware profile, such as profiles/hardware/cpu.toml; only a CPU's profile is replaced."""


def run(flags: KernelFlags) -> int:
    """Measure, print, and save if asked; returns 0. Raises Refusal for a file that may not be written."""
    with refusals():
        if flags.save:
            check_target(flags.save, kind=KIND)
    torch.set_num_threads(1)
    sizes = Sizes()
    rates = measure_kernels(sizes)
    hardware = hardware_of(rates, name=DEVICE)
    parts = measure_rates(hardware, RateSizes()) if flags.save else None
    if flags.save:
        with refusals():
            write_hardware(flags.save, hardware, kind=KIND, comment=comment_lines(flags.save), rates=parts)
    tell(rates, hardware, sizes, parts)
    return DONE


def comment_lines(file: Path) -> list[str]:
    """Where a profile's numbers come from."""
    return [
        f"Measured by: serried bench kernels --save {shlex.quote(str(file))}",
        machine_line(),
        f"commit    {commit()}",
        "One core as a device, with all of the machine's memory; link is the exchange among threads of one process.",
    ]


def tell(rates: Sequence[Rate], hardware: Hardware, sizes: Sizes, parts: Rates | None) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    for line in (
        QUESTION,
        machine_line(),
        f"commit    {commit()}",
        f"settings  one thread, {rates[0].rounds} rounds of everything in turns (up to {sizes.rounds} in "
        f"{sizes.seconds:g} s) after one to warm up; link: {sizes.sent} rows each way between two ranks as threads",
    ):
        out.print(line, markup=False)
    out.print(rate_table(rates))
    for line in rate_lines(parts) if parts is not None else ():
        out.print(line, markup=False)
    print(json.dumps(summary(rates, hardware)))


def rate_table(rates: Sequence[Rate]) -> Table:
    """A line for each piece of work; of those with the same peak, the best one counts."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("work", "median", "spread", "counts for"):
        table.add_column(name, justify="right" if name in ("median", "spread") else "left")
    for rate in rates:
        table.add_row(rate.name, f"{rate.per_s / 1e9:.1f} G{rate.unit}", f"{100 * rate.spread:.1f}%", rate.peak)
    return table


def summary(rates: Sequence[Rate], hardware: Hardware) -> dict[str, object]:
    """The last line: the peaks, and each piece of work."""
    return {
        "commit": commit(),
        "hardware": asdict(hardware),
        "works": [asdict(rate) for rate in rates],
    }
