"""A GPU's own clock, read by the GPU. Never run: there was no GPU where it was written; compiled for Hopper."""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

__all__ = ["CLOCK_OPTIONS", "CudaClock"]

CLOCK_OPTIONS = {"num_warps": 1}


@triton.jit
def _add_time_kernel(cell, SIGN: tl.constexpr):
    """One program: cell += SIGN * nanoseconds of the device's global timer.

    Example: cell 0 at 1000 ns with SIGN -1, then at 1700 ns with SIGN 1: 700.
    """
    tl.store(cell, tl.load(cell) + SIGN * globaltimer().to(tl.int64))


class CudaClock:
    """See `device_time.DeviceClock`."""

    def add(self, cell: Tensor, sign: int) -> None:
        _add_time_kernel[(1,)](cell, SIGN=sign, **CLOCK_OPTIONS)
