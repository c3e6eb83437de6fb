"""What a step leaves for the host, on its way there while the device goes on.

    device   step n | copy to the host, event | step n + 1 ........
    host     launch n, launch n + 1 ............ | wait for the event, read step n

Without it the host would wait for everything that the device was given, the next step too. Knows tensors; does not know
what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Readback(Protocol):
    """Tensors on their way."""

    def is_done(self) -> bool:
        """Whether they are on the host by now."""
        ...

    def wait(self) -> Sequence[Tensor]:
        """They are on the host."""
        ...


class HereAlready:
    """A CPU: they are where the host can read them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def is_done(self) -> bool:
        return True

    def wait(self) -> Sequence[Tensor]:
        return self._tensors


class CudaReadback:
    """Copies into pinned memory, on the current stream, and an event behind them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._on_host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for host, each in zip(self._on_host, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def is_done(self) -> bool:
        return self._done.query()

    def wait(self) -> Sequence[Tensor]:
        self._done.synchronize()
        return self._on_host


READBACKS: dict[str, Callable[[Sequence[Tensor]], Readback]] = {"cpu": HereAlready, "cuda": CudaReadback}


def read_back(tensors: Sequence[Tensor], device: torch.device) -> Readback:
    """Begin to bring these to the host."""
    return READBACKS[device.type](tensors)
