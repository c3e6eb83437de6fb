"""A kernel at a size in which real models use it: beside its reference in torch, and what it computes and moves.

    case.run("triton")      the rooms' ops in Triton, on this device
    case.run("reference")   the same in torch: slow, and right
    flops, num_bytes        what the work is at least, for a roofline

The same cases are measured (`serried bench kernels`) and checked (`serried doctor`). Inputs are random and seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSize:
    """How much there is to do: `batch` requests of `context` on each of `ranks`; pages hold 64."""

    batch: int = 128
    context: int = 2048
    ranks: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One piece of work.

    run       with the ops of that name; returns what it computed
    fast      which peak its arithmetic is held against: fp8, bf16, or "" where it has next to none
    bound     largest difference from the reference, as a share of a row's largest magnitude
    slots     experts that it computes, 0 for other work: where published tables look it up
    is_core   it is what published tables call the core of attention, of 128 heads
    """

    title: str
    run: Callable[[str], Tensor]
    flops: float = 0.0
    fast: str = "bf16"
    num_bytes: float
    bound: float = 0.02
    slots: int = 0
    is_core: bool = False


Random = Callable[..., Tensor]


def random_values(
    *shape: int, dice: torch.Generator, dtype: torch.dtype, scale: float = 1.0, as_dtype: Any = None
) -> Tensor:
    values = torch.randn(shape, generator=dice, device=dice.device) * scale
    return values.to(as_dtype or dtype)


def worst_difference(case: KernelCase) -> float:
    """Largest difference of Triton's result from torch's in any row, as a share of the row's largest magnitude.

    Infinite where either holds a NaN.
    """
    got, wanted = case.run("triton").double(), case.run("reference").double()
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    off = (got - wanted).abs().amax(dim=1) / wanted.abs().amax(dim=1).clamp_min(1e-30)
    return float(off.nan_to_num(nan=float("inf")).max())


def roof_us(case: KernelCase, peaks: Mapping[str, float], memory_bytes_per_s: float) -> float:
    """The longer of arithmetic and bytes at the device's peaks; `peaks` by the names of `KernelCase.fast`."""
    peak = peaks.get(case.fast) or peaks["bf16"]
    return max(case.flops / peak, case.num_bytes / memory_bytes_per_s) * 1e6
