"""`serried bench kernels` on a GPU: each Triton kernel over the shapes of real models, against its roofline.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. Knows how it is
said; what is measured is `runtime.bench.kernel_times`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.bench.kernel_case import CaseSize, KernelCase
from runtime.bench.kernel_cases import kernel_cases
from runtime.bench.kernel_times import CaseTime, flusher, time_cases
from runtime.model.model_config import ModelConfig, read_model_config
from runtime.weights.hardware import Hardware, read_hardware

from ..command.models import find_hardware, find_model
from ..command.wide_table import print_table
from ..groups.refusal import refusals
from .bench import commit, machine_line
from .bench_rank_slice import tables_of

DONE = 0
LEAST_EXPERTS = 8
"""Of a rank: a model with fewer is measured whole."""
QUESTION = "How long does each kernel take on this GPU, and how much of its roofline is that?"


def measure_on_gpu(
    models: Sequence[str], *, ep: int, batch: int, context: int, gpu: str, only: str, rounds: int
) -> int:
    """Measure and print; returns 0. Raises Refusal without a GPU, and for names that there are not."""
    with refusals():
        for name, value in (("ep", ep), ("batch", batch), ("context", context), ("rounds", rounds - 1)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, e.g. 32")
        if not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch sees no CUDA device; leave --device out to measure a core")
        path = find_hardware(gpu)
        hardware, tables = read_hardware(path), tables_of(str(path))
        found = {name: read_model_config(find_model(name)) for name in models}
    device = torch.device("cuda")
    times: list[CaseTime] = []
    with torch.inference_mode():
        for name, model in found.items():
            size = CaseSize(batch=batch, context=context, ranks=ranks_of(model, ep))
            cases = chosen(kernel_cases(model, size, name=name, device=device, dtype=torch.bfloat16), only)
            times += time_cases(cases, size, hardware=hardware, tables=tables, rounds=rounds, flush=flusher(device))
    tell(times, hardware, settings=f"batch {batch}, context {context}, EP{ep}, {rounds} calls each, cold caches")
    return DONE


def ranks_of(model: ModelConfig, ep: int) -> int:
    """As many as asked for where each then has enough experts, else one."""
    return ep if model.moe is not None and model.moe.num_experts >= LEAST_EXPERTS * ep else 1


def chosen(cases: Iterator[KernelCase], only: str) -> Iterator[KernelCase]:
    """Those with `only` in their title."""
    return (case for case in cases if only in case.title)


def tell(times: Sequence[CaseTime], hardware: Hardware, *, settings: str) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = (QUESTION, machine_line(), f"device    {device}; compared with {hardware.name}", f"commit    {commit()}")
    for line in (*lines, f"settings  {settings}"):
        out.print(line, markup=False)
    print_table(out, time_table(times))
    print(json.dumps({"commit": commit(), "device": device, "kernels": [asdict(each) for each in times]}))


def time_table(times: Sequence[CaseTime]) -> Table:
    """A line for each kernel."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("us", "median", "spread", "roofline", "reached", "published")
    for name in names:
        table.add_column(name, justify="left" if name == "us" else "right")
    for each in times:
        reached = f"{100 * each.roof_us / each.us:.0f}%" if each.us > 0 else ""
        published = "" if each.published_us is None else f"{each.published_us:.0f}"
        table.add_row(each.title, f"{each.us:.1f}", f"{each.spread_us:.1f}", f"{each.roof_us:.1f}", reached, published)
    return table
