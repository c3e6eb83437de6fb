"""`serried bench kernels`: every Triton kernel on a GPU; without one what a core of this machine reaches, as a profile.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. Knows how it is
said; what is measured is `runtime.bench.kernel_bench`, and on a GPU (`gpu_kernels`) `runtime.bench.kernel_times`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.kernel_bench import Rate, Sizes, hardware_of, measure_kernels
from runtime.bench.rate_bench import Checked, RateSizes, check_rates, measure_rates
from runtime.costs.hardware_file import check_target, write_hardware
from runtime.costs.rates import Rates
from runtime.model.model_config import read_model_config
from runtime.weights.hardware import Hardware

from ..command.models import find_model
from ..command.wide_table import print_table
from ..groups.refusal import refusals
from .bench import commit, machine_line
from .bench_rates import KIND, rate_lines
from .gpu_kernels import measure_on_gpu

ABOUT = """\
On a GPU: measure every Triton kernel over the shapes of real models. Without one: what one core of this machine
reaches in matrix products, memory, and the exchange among threads; with --save also what the parts of a layer take, for
the cost model.

Examples:
  serried bench kernels
  serried bench kernels --models deepseek-v3,kimi-k2 --ep 16 --only experts
  serried bench kernels --device cpu --save profiles/hardware/cpu.toml
  serried bench kernels --device cpu --check tiny-v3

The numbers of a core are the peaks that the cost model divides by; with --save it gets times of operations, which are
closer. It takes 3 to 8 seconds, and some 20 more with --save; CPU time leaves out waits and most of what else the
machine does, but cores share caches and memory, so an idle machine measures best.
"""

DONE = 0
DEVICE = f"{KIND}, one core"
QUESTION = "How many operations and bytes a second does one core of this machine reach (CPU time of one thread)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFlags:
    """What `serried bench kernels` is told."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What is measured; auto: the GPU if there is one."""

    models: str = "deepseek-v3,kimi-k2,deepseek-v2-lite"
    """On a GPU, whose shapes: names in profiles/models, with commas between."""

    ep: int = 32
    """On a GPU, ranks that share the experts; a model with fewer experts than ranks x 8 takes 1."""

    batch: int = 128
    """On a GPU, requests that decode."""

    context: int = 2048
    """On a GPU, tokens that each has in the cache."""

    gpu: str = "h200"
    """On a GPU, the device whose peaks and tables are compared with: a name in profiles/hardware."""

    only: str = ""
    """On a GPU, measure only kernels whose title contains this."""

    rounds: int = 30
    """On a GPU, calls of each kernel that are measured."""

    save: Path | None = None
    """File to write as a hardware profile, such as profiles/hardware/cpu.toml, of a core; only a CPU's is replaced."""

    check: str | None = None
    """Model to predict by what was measured, and to decode with random weights: says how far the cost model is off."""


def run(flags: KernelFlags) -> int:
    """Measure, print, and save if asked; returns 0. Raises Refusal for a file that may not be written."""
    if flags.device == "cuda" or (flags.device == "auto" and flags.save is None and torch.cuda.is_available()):
        return measure_on_gpu(
            flags.models.split(","),
            ep=flags.ep,
            batch=flags.batch,
            context=flags.context,
            gpu=flags.gpu,
            only=flags.only,
            rounds=flags.rounds,
        )
    with refusals():
        if flags.save:
            check_target(flags.save, kind=KIND)
        config = config_file(flags.check) if flags.check else None
    torch.set_num_threads(1)
    sizes = Sizes()
    rates = measure_kernels(sizes)
    hardware = hardware_of(rates, name=DEVICE)
    parts = measure_rates(hardware, RateSizes()) if flags.save or config else None
    if flags.save:
        with refusals():
            write_hardware(flags.save, hardware, kind=KIND, comment=comment_lines(flags.save), rates=parts)
    checked = check_rates(config, parts, hardware, RateSizes()) if parts is not None and config is not None else []
    tell(rates, hardware, sizes, parts, checked)
    return DONE


def config_file(name: str) -> Path:
    """The configuration of a model. Raises ValueError or OSError for one that is not known or cannot be run."""
    path = find_model(name)
    read_model_config(path)
    return path


def comment_lines(file: Path) -> list[str]:
    """Where a profile's numbers come from."""
    return [
        f"Measured by: serried bench kernels --save {shlex.quote(str(file))}",
        machine_line(),
        f"commit    {commit()}",
        "One core as a device, with all of the machine's memory; link is the exchange among threads of one process.",
    ]


def tell(
    rates: Sequence[Rate], hardware: Hardware, sizes: Sizes, parts: Rates | None, checked: Sequence[Checked]
) -> None:
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
    print_table(out, rate_table(rates))
    for line in [*(rate_lines(parts) if parts is not None else ()), *check_lines(checked)]:
        out.print(line, markup=False)
    print(json.dumps(summary(rates, hardware, checked)))


def rate_table(rates: Sequence[Rate]) -> Table:
    """A line for each piece of work; of those with the same peak, the best one counts."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("work", "median", "spread", "counts for"):
        table.add_column(name, justify="right" if name in ("median", "spread") else "left")
    for rate in rates:
        table.add_row(rate.name, f"{rate.per_s / 1e9:.1f} G{rate.unit}", f"{100 * rate.spread:.1f}%", rate.peak)
    return table


def check_lines(checked: Sequence[Checked]) -> list[str]:
    """Predicted beside measured, a line a number of requests."""
    return [
        f"{each.tokens:>4} requests: a step takes {each.measured_us / 1e3:.2f} ms, predicted "
        f"{each.predicted.total_us / 1e3:.2f} ms ({each.error:+.1%})"
        for each in checked
    ]


def summary(rates: Sequence[Rate], hardware: Hardware, checked: Sequence[Checked]) -> dict[str, object]:
    """The last line: the peaks, each piece of work, and steps predicted and measured."""
    return {
        "steps": [
            {
                "requests": each.tokens,
                "measured_ms": round(each.measured_us / 1e3, 3),
                "predicted_ms": round(each.predicted.total_us / 1e3, 3),
                "error": round(each.error, 4),
            }
            for each in checked
        ],
        "commit": commit(),
        "hardware": asdict(hardware),
        "works": [asdict(rate) for rate in rates],
    }
