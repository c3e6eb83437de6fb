"""Whose product of fp8 blocks runs, for each shape of a weight: torch's own scaled matmul where it is right and faster,
else Triton's kernel. Tried on the device when the shape is first met, which is before anything is captured.

    tokens 128     both run; torch's must be as near to `linear_blocks` as bf16 allows, then each is timed

One answer for all numbers of tokens: a row shall not depend on how many there are by our choice. That torch's library
chooses alike for all of them nobody promises, as for plain weights; the kernel's rows never depend on batch mates.
Torch's is never asked without a GPU. Knows products; does not know layers. Has never run on a GPU.

Letters: T tokens here, D inputs, N outputs, G and Q their blocks of 128.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .matrix import Fp8Matrix, Fp8Rows, linear_blocks, num_blocks

__all__ = ["ChosenProduct", "Product", "Trial", "timed_us", "torch_product"]

TRY_TOKENS = 128
NEAR = 2.0**-7
"""Of a row's largest value: two units in the last place of bf16."""
TRY_CALLS = 20


class Product(Protocol):
    """[T, N] in the rows' dtype."""

    def __call__(self, rows: Fp8Rows, matrix: Fp8Matrix) -> Tensor: ...


class Trial(NamedTuple):
    """How it went for one shape (N, D).

    theirs_us, ours_us   a call, microseconds; None where torch's was not timed
    why                  what keeps torch's from being taken; empty where it is
    """

    why: str
    theirs_us: float | None = None
    ours_us: float | None = None


class ChosenProduct:
    """A `Product`. `trials`: what was found so far, by shape of the weight."""

    def __init__(self, ours: Product, theirs: Product, *, timed_us: Callable[[Callable[[], object]], float]) -> None:
        """timed_us: microseconds of one call on the device."""
        self._ours = ours
        self._theirs = theirs
        self._timed_us = timed_us
        self.trials: dict[tuple[int, ...], Trial] = {}

    def __call__(self, rows: Fp8Rows, matrix: Fp8Matrix) -> Tensor:
        shape = tuple(matrix.values_ND.shape)
        if shape not in self.trials:
            self.trials[shape] = self._try(matrix, rows.dtype)
        product = self._ours if self.trials[shape].why else self._theirs
        return product(rows, matrix)

    def _try(self, matrix: Fp8Matrix, dtype: torch.dtype) -> Trial:
        rows = _trial_rows(matrix, dtype)
        try:
            found_TN = self._theirs(rows, matrix)
        except (RuntimeError, ValueError, AttributeError) as error:  # older builds lack it, or this device does
            return Trial(f"torch's: {(str(error).strip() or repr(error)).splitlines()[0]}")
        off = _distance(found_TN, rows, matrix)
        if not off <= NEAR:
            return Trial(f"torch's is off by {off:.3g} of a row's largest value, at most {NEAR:.3g}")
        theirs_us = self._timed_us(lambda: self._theirs(rows, matrix))
        ours_us = self._timed_us(lambda: self._ours(rows, matrix))
        why = "" if theirs_us < ours_us else f"torch's takes {theirs_us:.1f} us, the kernel {ours_us:.1f}"
        return Trial(why, theirs_us, ours_us)


def _trial_rows(matrix: Fp8Matrix, dtype: torch.dtype) -> Fp8Rows:
    """Rows whose blocks have scales far apart, as activations do."""
    device, width = matrix.values_ND.device, matrix.values_ND.shape[1]
    noise = torch.Generator(device=device).manual_seed(0)
    values_TD = torch.randn(TRY_TOKENS, width, generator=noise, device=device) * 64
    scales_TG = torch.rand(TRY_TOKENS, num_blocks(width), generator=noise, device=device) + 0.01
    return Fp8Rows(values_TD=values_TD.to(matrix.values_ND.dtype), scales_TG=scales_TG, dtype=dtype)


def _distance(found_TN: Tensor, rows: Fp8Rows, matrix: Fp8Matrix) -> float:
    """The largest error of an element, as a share of its row's largest value; nan where something is not a number."""
    wanted_TN = linear_blocks(rows.values_TD, rows.scales_TG, matrix.values_ND, matrix.scales_QG)
    largest_T1 = wanted_TN.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found_TN.double() - wanted_TN).abs() / largest_T1).max())


def torch_product(rows: Fp8Rows, matrix: Fp8Matrix) -> Tensor:
    """Torch's `scaled_mm` with a scale for each row and 128 columns, and for each 128 x 128 block of the weight.

    It wants rows' scales by column, and the weight's rows of scales at multiples of four numbers.
    """
    scaling = functional.ScalingType
    return functional.scaled_mm(
        rows.values_TD,
        matrix.values_ND.t(),
        rows.scales_TG.t().contiguous().t(),
        scaling.BlockWise1x128,
        _in_fours(matrix.scales_QG).t(),
        scaling.BlockWise128x128,
        output_dtype=rows.dtype,
    )


def _in_fours(scales_QG: Tensor) -> Tensor:
    """[Q, G rounded up to a multiple of four]."""
    return functional.pad(scales_QG, (0, -scales_QG.shape[1] % 4))


def timed_us(call: Callable[[], object]) -> float:
    """On a GPU: microseconds of one of many calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(TRY_CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / TRY_CALLS
