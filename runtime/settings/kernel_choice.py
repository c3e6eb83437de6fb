"""Whose code computes a step's layers: torch's, or Triton's kernels; settled before anything is built.

    reference    torch, on any device and in any number format; the host waits for the device
    onednn       torch on a CPU in bf16, with weights packed as its oneDNN reads them: a copy of all but the embedding
    triton       on a GPU compiled; on a CPU in Triton's interpreter, which is slow and for comparison only

Knows what each can do; what they do is the rooms' `ops`.
"""

from __future__ import annotations

from typing import Literal

import torch

from attention_mla import interpreted

OpsName = Literal["reference", "onednn", "triton"]
PAGE_MULTIPLE = 16
"""Positions of the smallest block that kernels read; a block lies on one page."""


def choose_ops(asked: str, *, device: torch.device, dtype: torch.dtype, page_size: int) -> OpsName:
    """Settle `auto`; what a user asked for stays, or is refused with ValueError."""
    if asked == "auto":
        able = device.type == "cuda" and dtype is not torch.float64 and page_size % PAGE_MULTIPLE == 0
        if able:
            return "triton"
        return "onednn" if device.type == "cpu" and dtype is torch.bfloat16 and has_packed_bf16() else "reference"
    if asked == "reference":
        return "reference"
    if asked == "onednn":
        return _onednn(device, dtype)
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


def has_packed_bf16() -> bool:
    """Whether this torch has oneDNN, and oneDNN bf16 matmuls for this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _onednn(device: torch.device, dtype: torch.dtype) -> OpsName:
    if device.type != "cpu":
        raise ValueError(f"ops is 'onednn' on device {device.type!r}; oneDNN computes on a CPU, e.g. --ops auto")
    if dtype is not torch.bfloat16:
        raise ValueError(f"ops is 'onednn' and dtype {dtype}; only bfloat16 is packed, e.g. --ops reference")
    if not has_packed_bf16():
        raise ValueError("ops is 'onednn'; this torch or processor has no bf16 matmul of oneDNN, e.g. --ops reference")
    return "onednn"
