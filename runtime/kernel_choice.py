"""Whose code computes a step's layers: torch's, or Triton's kernels; settled before anything is built.

    reference    torch, on any device and in any number format; the host waits for the device
    triton       on a GPU compiled; on a CPU in Triton's interpreter, which is slow and for comparison only

Knows what each can do; what they do is the rooms' `ops`.
"""

from __future__ import annotations

from typing import Literal

import torch

from attention_mla import interpreted

OpsName = Literal["reference", "triton"]
PAGE_MULTIPLE = 16
"""Positions of the smallest block that kernels read; a block lies on one page."""


def choose_ops(asked: str, *, device: torch.device, dtype: torch.dtype, page_size: int) -> OpsName:
    """Settle `auto`; what a user asked for stays, or is refused with ValueError."""
    if asked == "auto":
        able = device.type == "cuda" and dtype is not torch.float64 and page_size % PAGE_MULTIPLE == 0
        return "triton" if able else "reference"
    if asked == "reference":
        return "reference"
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
