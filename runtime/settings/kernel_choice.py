"""Whose code computes a step's layers: torch's, Triton's kernels or Numba's; settled before anything is built.

    reference    torch, on any device and in any number format; the host waits for the device
    numba        on a CPU in bf16, compiled for its processor, with packed weights: a copy of all but the embedding
    triton       on a GPU compiled; on a CPU in Triton's interpreter, which is slow and for comparison only

Knows what each can do; what they do is the rooms' `ops`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

from attention_mla import interpreted

OpsName = Literal["reference", "numba", "triton"]
PAGE_MULTIPLE = 16
"""Positions of the smallest block that kernels read; a block lies on one page."""


def choose_ops(asked: str, *, device: torch.device, dtype: torch.dtype, page_size: int) -> OpsName:
    """Settle `auto`; what a user asked for stays, or is refused with ValueError."""
    if asked == "auto":
        able = device.type == "cuda" and dtype is not torch.float64 and page_size % PAGE_MULTIPLE == 0
        if able:
            return "triton"
        return "numba" if device.type == "cpu" and dtype is torch.bfloat16 and has_numba() else "reference"
    if asked == "reference":
        return "reference"
    if asked == "numba":
        return _numba(device, dtype)
    if dtype is torch.float64:
        raise ValueError("ops is 'triton' and dtype float64; kernels go up to float32, e.g. --dtype float32")
    if page_size % PAGE_MULTIPLE:
        raise ValueError(
            f"block_size is {page_size}; with ops triton it must be a multiple of {PAGE_MULTIPLE}, e.g. 64"
        )
    if device.type == "cpu" and not interpreted():
        raise ValueError(
            "ops is 'triton' on device 'cpu', where kernels run in Triton's interpreter; set TRITON_INTERPRET=1 before "
            "Python starts, or choose ops reference"
        )
    return "triton"


def has_numba() -> bool:
    """Whether the package is installed."""
    return find_spec("numba") is not None


def _numba(device: torch.device, dtype: torch.dtype) -> OpsName:
    if device.type != "cpu":
        raise ValueError(f"ops is 'numba' on device {device.type!r}; its kernels are for a CPU, e.g. --ops auto")
    if dtype is not torch.bfloat16:
        raise ValueError(f"ops is 'numba' and dtype {dtype}; its kernels are for bfloat16, e.g. --ops reference")
    if not has_numba():
        raise ValueError("ops is 'numba'; it needs the package numba: pip install numba, or choose reference")
    return "numba"
