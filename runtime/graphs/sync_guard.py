"""Warm steps that make the host wait for the device, or that allocate: what --debug-sync ends the run for.

    step 0 .. 15    nothing is asked: kernels are compiled, memory is found
    step 16 ..      torch raises where the host would wait; no new piece of the device's memory may be taken

Only launching is guarded: reading a step waits on purpose. Has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

WARM_AFTER = 16
"""Launches."""


class Guard(Protocol):
    """Of one rank."""

    def step(self) -> AbstractContextManager[None]:
        """Around the launch of one step."""
        ...


class NoGuard:
    """Nobody asked, or there is no device to wait for."""

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaGuard:
    """Torch's own debug mode, and the count of pieces that its allocator has asked the driver for."""

    def __init__(
        self,
        *,
        set_mode: Callable[[str], None] | None = None,
        pieces: Callable[[], int] | None = None,
    ) -> None:
        """Both are torch's where they are left out."""
        self._set_mode = set_mode or torch.cuda.set_sync_debug_mode
        self._pieces = pieces or _pieces
        self._launches = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `Guard`. RuntimeError where a warm step waits or allocates."""
        self._launches += 1
        if self._launches <= WARM_AFTER:
            yield
            return
        before = self._pieces()
        self._set_mode("error")
        try:
            yield
        finally:
            self._set_mode("default")
        taken = self._pieces() - before
        if taken:
            raise RuntimeError(f"launch {self._launches} took {taken} new pieces of the device's memory while warm")


def _pieces() -> int:
    return int(torch.cuda.memory_stats().get("segment.all.allocated", 0))


def guard_of(device: torch.device, *, debug_sync: bool) -> Guard:
    """That of a rank on this device."""
    return CudaGuard() if debug_sync and device.type == "cuda" else NoGuard()
