"""`serried bench compile`: every Triton kernel at the sizes of real models, compiled for a GPU that need not be here.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. A kernel that
spills registers, lacks an instruction that it is built around, or wants more than a multiprocessor has is a failure.
Knows how it is said; what a kernel is compiled for is the rooms' `kernel_shapes`, how it went `compile_report`'s.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from ..command.wide_table import print_table
from ..groups.refusal import Refusal
from .bench import commit, machine_line

if TYPE_CHECKING:
    from .compile_report import Report

ABOUT = """\
Compile every Triton kernel at its production shapes for a GPU that need not be here, and say what came out.

Examples:
  serried bench compile
  serried bench compile --arch sm_90 --only attend

Fails (exit code 1) on spilled registers, on a kernel without the matrix or copy instructions that it is built around,
and on one that wants more than a multiprocessor has. The first run takes minutes, later ones read what was found.
"""

DONE, FAILED = 0, 1
ROOMS = ("attention_mla", "moe", "ep", "runtime.sampling", "runtime.forward")
"""Those that have kernels, or their parts."""
QUESTION = "Do all kernels compile for {arch} without spills, with the instructions that they are built around?"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFlags:
    """What `serried bench compile` is told."""

    arch: Literal["sm_90"] = "sm_90"
    """What to compile for: sm_90 is Hopper (H100, H200)."""

    only: str = ""
    """Compile only kernels whose title contains this."""

    fresh: bool = False
    """Compile anew what was compiled before."""


def run(flags: CompileFlags) -> int:
    """Compile and print; returns 0 where every kernel is as it should be. Raises Refusal without Triton's compiler."""
    shapes = [shape for shape in all_shapes() if flags.only in shape["title"]]
    if not shapes:
        raise Refusal(f"only is {flags.only!r}; no kernel has that in its title, e.g. --only attend")
    compiler = importlib.import_module(".compile_report", __package__)
    capability = int(flags.arch.removeprefix("sm_"))
    reports = [compiler.compile_kernel(shape, capability=capability, fresh=flags.fresh) for shape in shapes]
    tell(reports, flags)
    return FAILED if any(report.faults for report in reports) else DONE


def all_shapes() -> list[dict[str, Any]]:
    """The lines of all rooms, titles with the room before them. Raises Refusal where they cannot be compiled."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise Refusal("TRITON_INTERPRET is set, so kernels would run in the interpreter; unset it to compile them")
    if find_spec("triton") is None:
        raise Refusal("triton is not installed; install it with: pip install 'serried[gpu]'")
    shapes = []
    for room in ROOMS:
        for shape in importlib.import_module(f"{room}.kernel_shapes").kernel_shapes():
            shapes.append(shape | {"title": f"{room.split('.')[0]}: {shape['title']}"})
    return shapes


def tell(reports: Sequence[Report], flags: CompileFlags) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True, width=150)
    for line in (
        QUESTION.format(arch=flags.arch),
        machine_line(),
        f"commit    {commit()}",
        f"settings  {len(reports)} kernels, triton {version('triton')}, {flags.arch}"
        + (f", only titles with {flags.only!r}" if flags.only else ""),
    ):
        out.print(line, markup=False)
    print_table(out, report_table(reports))
    for report in reports:
        for fault in report.faults:
            out.print(f"fault     {report.title}: {fault}", markup=False)
    print(json.dumps(summary(reports, flags)))


def report_table(reports: Sequence[Report]) -> Table:
    """A line for each kernel."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("kernel", "registers", "threads", "spilled B", "shared B", "wgmma", "cp.async", "tma", "s")
    for name in names:
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for report in reports:
        counts = [report.registers, report.threads, report.spilled_bytes, report.shared_bytes]
        counts += [report.instructions[name] for name in ("wgmma", "cp.async", "tma")]
        table.add_row(report.title, *map(str, counts), f"{report.seconds:.1f}")
    return table


def summary(reports: Sequence[Report], flags: CompileFlags) -> dict[str, object]:
    """The last line."""
    return {
        "arch": flags.arch,
        "triton": version("triton"),
        "commit": commit(),
        "kernels": [asdict(report) for report in reports],
        "faults": sum(len(report.faults) for report in reports),
    }
