"""How long kernels take on a GPU, case by case: each call by itself, with cold caches and a queue that is never empty.

    queue    | flush the L2 | event | kernel | event | flush | event | kernel | event ..

The flush keeps the device busy while the host launches what comes next, so that a gap between launches is in no time.
Knows cases; does not know what they compute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..costs.cost_tables import CostTables
from ..weights.hardware import Hardware
from .kernel_case import CaseSize, KernelCase, roof_us
from .stages import Clock, CudaClock

FLUSHED_BYTES = 256 << 20
"""More than any L2 holds; writing it takes longer than a launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTime:
    """Microseconds of one case: median and middle half, its roofline, and a published time or None."""

    title: str
    us: float
    spread_us: float
    roof_us: float
    published_us: float | None


def flusher(device: torch.device) -> Callable[[], object]:
    """What empties the caches and keeps the queue busy."""
    waste = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    return waste.zero_


def time_case(
    case: KernelCase, *, rounds: int, flush: Callable[[], object], clock: Clock | None = None
) -> tuple[float, float]:
    """(median, width of the middle half) of so many calls, after two to compile and warm up."""
    clock = clock or CudaClock()
    for _ in range(2):
        case.run("triton")
    stamps = []
    for _ in range(rounds):
        flush()
        begin = clock.stamp()
        case.run("triton")
        stamps.append((begin, clock.stamp()))
    low, middle, high = statistics.quantiles([clock.between_us(*each) for each in stamps], n=4, method="inclusive")
    return middle, high - low


def time_cases(
    cases: Iterable[KernelCase],
    size: CaseSize,
    *,
    hardware: Hardware,
    tables: CostTables | None,
    rounds: int,
    flush: Callable[[], object],
    clock: Clock | None = None,
) -> Iterator[CaseTime]:
    """One after the other, so that each gives its memory back."""
    peaks = {"fp8": hardware.fp8_flops, "bf16": hardware.bf16_flops}
    for case in cases:
        us, spread_us = time_case(case, rounds=rounds, flush=flush, clock=clock)
        yield CaseTime(
            title=case.title,
            us=us,
            spread_us=spread_us,
            roof_us=roof_us(case, peaks, hardware.memory_bytes_per_s),
            published_us=_published_us(case, size, tables),
        )


def _published_us(case: KernelCase, size: CaseSize, tables: CostTables | None) -> float | None:
    """Experts are looked up by how many there are: as wide, and with as many rows, as those of the measured model."""
    if tables is not None and case.is_core:
        return tables.core_us.at(size.batch, size.context)
    if tables is not None and case.slots and case.fast == "fp8":
        return tables.routed_us.at(case.slots, size.batch)
    return None
