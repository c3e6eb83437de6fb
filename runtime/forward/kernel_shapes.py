"""The part's kernels, for whoever compiles them without a device: lines in the words of `attention_mla.kernel_shapes`.
Needs triton."""

from typing import Any

from .clock_kernels import CLOCK_OPTIONS, _add_time_kernel

__all__ = ["kernel_shapes"]


def kernel_shapes() -> list[dict[str, Any]]:
    """One dict for each kernel."""
    return [
        {
            "title": "add the device's time",
            "kernel": _add_time_kernel,
            "signature": {"cell": "*i64"},
            "constants": {"SIGN": -1},
            "options": CLOCK_OPTIONS,
            "must": set(),
        }
    ]
