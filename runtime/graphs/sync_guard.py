"""Warm steps that make the host wait for the device, or that take what was to be there at the start: memory of the
device, kernels, communicators. What --debug-sync ends the run for.

    step 0 .. 15    nothing is asked: kernels are compiled, memory is found
    step 16 ..      torch raises where the host would wait; whatever was taken since the last step is named

Only launching is guarded against waits: reading a step waits on purpose. What is taken is counted between steps too.
Has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, Protocol

import torch

WARM_AFTER = 16
"""Launches."""


class Guard(Protocol):
    """Of one rank."""

    def step(self) -> AbstractContextManager[None]:
        """Around the launch of one step."""
        ...

    def excused(self) -> AbstractContextManager[None]:
        """Around what a step may wait and take things for, be it warm or not."""
        ...


class NoGuard:
    """Nobody asked, or there is no device to wait for."""

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def excused(self) -> AbstractContextManager[None]:
        return nullcontext()


class Ledger(Protocol):
    """One kind of thing that is there at the start, and of which no more is to come."""

    def news(self) -> list[str]:
        """What came since this was last asked, in words."""
        ...


class Counted:
    """Things that somebody else counts."""

    def __init__(self, what: str, count: Callable[[], int]) -> None:
        self._what = what
        self._count = count
        self._known = count()

    def news(self) -> list[str]:
        """See `Ledger`."""
        now = self._count()
        new, self._known = now - self._known, now
        return [f"{new} new {self._what}"] if new > 0 else []


class CompiledKernels:
    """Kernels that Triton compiles, by name, whoever launches them. Hears of them from now on, and tells its hook's
    last owner as well."""

    def __init__(self, knobs: Any) -> None:
        """knobs: `triton.knobs.runtime`."""
        self._names: list[str] = []
        self._before = knobs.jit_post_compile_hook
        knobs.jit_post_compile_hook = self._hear

    def _hear(self, *, fn: Any, **about: Any) -> bool | None:
        self._names.append(f"kernel {fn.name} compiled")
        return None if self._before is None else self._before(fn=fn, **about)

    def news(self) -> list[str]:
        """See `Ledger`."""
        names, self._names = self._names, []
        return names


class WarmGuard:
    """Torch's own debug mode, and ledgers that are to stay as they are."""

    def __init__(self, ledgers: Sequence[Ledger], *, set_mode: Callable[[str], None]) -> None:
        """set_mode: "error" where a wait of the host is to raise, else "default"."""
        self._ledgers = ledgers
        self._set_mode = set_mode
        self._launches = 0
        self._found: list[str] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `Guard`. RuntimeError where a warm step waits, or something was taken since the last one."""
        self._launches += 1
        if self._launches <= WARM_AFTER:
            yield
            self._news()
            return
        self._set_mode("error")
        try:
            yield
        finally:
            self._set_mode("default")
        taken, self._found = [*self._found, *self._news()], []
        if taken:
            raise RuntimeError(f"launch {self._launches} or what came before it took, while warm: {', '.join(taken)}")

    @contextmanager
    def excused(self) -> Iterator[None]:
        """See `Guard`."""
        self._set_mode("default")
        self._found += self._news()
        yield
        self._news()
        if self._launches > WARM_AFTER:
            self._set_mode("error")

    def _news(self) -> list[str]:
        return [word for ledger in self._ledgers for word in ledger.news()]


def _cuda_guard(communicators: Callable[[], int]) -> Guard:
    ledgers = (
        Counted("pieces of the device's memory", _pieces),
        CompiledKernels(import_module("triton").knobs.runtime),
        Counted("communicators", communicators),
    )
    return WarmGuard(ledgers, set_mode=torch.cuda.set_sync_debug_mode)


def _pieces() -> int:
    """That torch's allocator has asked the driver for."""
    return int(torch.cuda.memory_stats().get("segment.all.allocated", 0))


GUARDS: dict[str, Callable[[Callable[[], int]], Guard]] = {"cuda": _cuda_guard}
"""By the kind of device; told how to count the transport's communicators."""


def guard_of(device: torch.device, *, debug_sync: bool, communicators: Callable[[], int]) -> Guard:
    """That of a rank on this device."""
    return GUARDS[device.type](communicators) if debug_sync and device.type in GUARDS else NoGuard()
