"""What one core of this machine reaches: matrix products, reads and copies of memory, the threads' exchange.

These are the peaks that `roofline` divides by. Every piece of work runs once to warm up, then all of them run in
turns, so that a disturbance falls on all; of each the median counts, and a peak is the best of its pieces' medians.
Time is the process's CPU time: work with one thread only (torch.set_num_threads), and neither waits nor other
processes count. Knows no accelerator and prints nothing.

    bf16_flops           products with an expert's and an attention's weights, in bfloat16
    memory_bytes_per_s   a tensor that fits in no cache is summed up; is copied (bytes read and bytes written)
    link_bytes_per_s     two ranks swap rows through `ThreadGroup`: the bytes that leave one of them
    fp8_flops, network   0: a CPU multiplies no fp8, and threads need no network

Shapes: T tokens here, D inputs and F outputs of a product, N rows sent.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from ep import Kind, Tag, ThreadGroup, ThreadTransport

from ..weights.hardware import Hardware

LEAST_ROUNDS = 3
"""Measured even when they take longer than wanted: fewer have no median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a piece of work is. Products are [T, D] x [D, F] of DeepSeek-V3; memory is several times a cache.

    rows      sent at once: of 16 and of 128 tokens with 8 experts each, half of them on the other rank. The exchange
              puts rows on a heap first; where that is large, the system clears its memory anew every time
    sent      rows that each rank sends in all
    rounds    at most; fewer when another one would end after `seconds`, but never fewer than LEAST_ROUNDS
    """

    products: tuple[tuple[str, int, int, int], ...] = (
        ("expert gate", 128, 7168, 2048),
        ("expert down", 128, 2048, 7168),
        ("query down", 512, 7168, 1536),
    )
    memory_bytes: int = 256 << 20
    rows: tuple[int, ...] = (64, 512)
    row_bytes: int = 2 * 7168
    sent: int = 8192
    rounds: int = 15
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(f"rounds is {self.rounds}; it must be at least {LEAST_ROUNDS}, e.g. 15")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`run` does `amount` operations or bytes. `peak` is the field of Hardware that it counts for, if any."""

    name: str
    unit: str
    peak: str
    amount: float
    run: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a piece of work reached, per second; `spread` is the middle half's width as a share of the median."""

    name: str
    unit: str
    peak: str
    per_s: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, work: Work, took_ns: Sequence[int]) -> Self:
        """From the times of its rounds."""
        rates = [work.amount / (1e-9 * max(each, 1)) for each in took_ns]
        low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
        return cls(
            name=work.name,
            unit=work.unit,
            peak=work.peak,
            per_s=middle,
            spread=(high - low) / middle,
            rounds=len(rates),
        )


def measure_kernels(sizes: Sizes) -> list[Rate]:
    """Do all the work in turns, for about `sizes.seconds`; the caller has set one thread."""
    assert torch.get_num_threads() == 1, f"{torch.get_num_threads()} threads; CPU time would count each of them"
    works = [*product_works(sizes), *memory_works(sizes), *exchange_works(sizes)]
    begin = time.monotonic()
    with torch.inference_mode():
        for work in works:
            work.run()
        rounds: list[list[int]] = []
        while _another(len(rounds), time.monotonic() - begin, sizes):
            rounds.append([_time_ns(work) for work in works])
    return [Rate.of(work, took_ns) for work, took_ns in zip(works, zip(*rounds, strict=True), strict=True)]


def _another(done: int, elapsed_s: float, sizes: Sizes) -> bool:
    """Whether one more round, as long as those before (and the warm-up, which counts as one), ends in time."""
    if done < LEAST_ROUNDS:
        return True
    return done < sizes.rounds and elapsed_s * (done + 2) / (done + 1) <= sizes.seconds


def _time_ns(work: Work) -> int:
    begin = time.process_time_ns()
    work.run()
    return time.process_time_ns() - begin


def product_works(sizes: Sizes) -> list[Work]:
    """Each product in bfloat16, and in float32 to compare with: no field of Hardware takes that."""
    works = []
    generator = torch.Generator().manual_seed(0)
    for name, tokens, inputs, outputs in sizes.products:
        x_TD = torch.randn(tokens, inputs, generator=generator)
        weight_FD = torch.randn(outputs, inputs, generator=generator)
        works += [
            Work(
                name=f"{name} {tokens}x{inputs}x{outputs} {str(dtype).removeprefix('torch.')}",
                unit="op/s",
                peak=peak,
                amount=2.0 * tokens * inputs * outputs,
                run=partial(linear, x_TD.to(dtype), weight_FD.to(dtype)),
            )
            for dtype, peak in ((torch.bfloat16, "bf16_flops"), (torch.float32, ""))
        ]
    return works


def memory_works(sizes: Sizes) -> list[Work]:
    """Reading, and copying: as many bytes again are written."""
    source = torch.ones(sizes.memory_bytes // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    size = f"{sizes.memory_bytes / 2**20:g} MiB"
    num_bytes = source.numel() * source.element_size()
    works = (f"read {size}", num_bytes, source.sum), (f"copy {size}", 2 * num_bytes, partial(target.copy_, source))
    return [
        Work(name=name, unit="B/s", peak="memory_bytes_per_s", amount=amount, run=run) for name, amount, run in works
    ]


def exchange_works(sizes: Sizes) -> list[Work]:
    """Two ranks, threads of this process, send each other rows, a few or many at once."""
    return [_exchange_work(rows, sizes.row_bytes, swaps=sizes.sent // rows) for rows in sizes.rows]


def _exchange_work(rows: int, row_bytes: int, *, swaps: int) -> Work:
    group: ThreadGroup[None] = ThreadGroup(2)
    sends = [torch.ones(rows, row_bytes, dtype=torch.uint8) for _ in range(2)]
    recvs = [torch.empty_like(send) for send in sends]

    def swap(transport: ThreadTransport) -> None:
        for step in range(swaps):
            _swap_rows(transport, recvs[transport.rank], sends[transport.rank], step=step)

    def run() -> None:
        group.start(swap)
        group.join()

    return Work(
        name=f"threads swap {rows} rows of {row_bytes} B",
        unit="B/s",
        peak="link_bytes_per_s",
        amount=float(swaps * rows * row_bytes),
        run=run,
    )


def _swap_rows(transport: ThreadTransport, recv: Tensor, send: Tensor, *, step: int) -> None:
    splits = [0 if rank == transport.rank else len(send) for rank in range(transport.size)]
    tag = Tag(step=step, layer=0, track=0, round=0, kind=Kind.DISPATCH)
    transport.all_to_all(recv, send, recv_splits=splits, send_splits=splits, tag=tag).wait()


def hardware_of(rates: Sequence[Rate], *, name: str) -> Hardware:
    """One core as a device, with all of the machine's memory."""
    peaks = {peak: max(rate.per_s for rate in rates if rate.peak == peak) for peak in {rate.peak for rate in rates}}
    return Hardware(
        name=name,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        bf16_flops=peaks["bf16_flops"],
        fp8_flops=0,
        memory_bytes_per_s=peaks["memory_bytes_per_s"],
        link_bytes_per_s=peaks["link_bytes_per_s"],
        network_bytes_per_s=0,
    )
