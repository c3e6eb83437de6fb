"""How long starting takes, phase by phase, and what loading read: as this program counts it, and as the kernel does.

Knows clocks and counters; does not know what the phases do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .memory import gib

_GIGA = 1e9


class StartupTimes:
    """The phases of one start, one after the other without a gap: `mark` says which one has just ended.

    times = StartupTimes(began=process_began())
    times.mark("import"), times.mark("config"), times.mark("plan"), times.mark("load"), times.mark("warm-up")
    times.line()  ->  "ready in 3.41 s: import 2.10, config 0.01, plan 0.01, load 0.88, warm-up 0.41"
    """

    def __init__(self, *, began: float | None = None) -> None:
        """began: on the clock of time.monotonic(); None: now."""
        self._last = time.monotonic() if began is None else began
        self._seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """`phase` ended now; it had begun where the one before ended. Marked again, it grows."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase, in the order in which they first ended."""
        return dict(self._seconds)

    @property
    def total(self) -> float:
        return sum(self._seconds.values())

    def line(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
        return f"ready in {self.total:.2f} s: {phases}"


def process_began() -> float:
    """When the kernel started this process, on the clock of time.monotonic(); to a hundredth of a second."""
    # The command's name, in parentheses, may hold spaces; what follows it is field 3, and the start is field 22.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReads:
    """What the kernel has counted for this process since it began.

    bytes   that read calls returned, wherever from (memory maps are not counted)
    calls   of read
    disk    bytes that had to be fetched from storage, page faults included; 0 where all was in the page cache
    """

    bytes: int
    calls: int
    disk: int

    @classmethod
    def now(cls) -> KernelReads | None:
        """None where the kernel does not tell."""
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
        except OSError:
            return None
        values = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        return cls(bytes=values["rchar"], calls=values["syscr"], disk=values["read_bytes"])

    def since(self, before: KernelReads) -> KernelReads:
        """The difference."""
        return KernelReads(
            bytes=self.bytes - before.bytes, calls=self.calls - before.calls, disk=self.disk - before.disk
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank read of its weights, and all ranks of its node together. Bytes are data, without headers."""

    bytes_read: int
    seconds: float
    kernel: KernelReads | None
    num_ranks: int
    node_bytes: int
    node_seconds: float
    """The slowest rank's."""

    def lines(self) -> list[str]:
        """For a person: this rank, the kernel's word on it, and the node."""
        lines = [f"read {_rate(self.bytes_read, self.seconds)}"]
        if self.kernel is not None:
            counted = self.kernel
            lines.append(f"  kernel: {gib(counted.bytes)} in {counted.calls} calls, {gib(counted.disk)} from storage")
        lines.append(f"  node: {_rate(self.node_bytes, self.node_seconds)} by {self.num_ranks} ranks")
        return lines


def _rate(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / seconds / _GIGA if seconds > 0 else 0.0
    return f"{gib(num_bytes)} in {seconds:.2f} s, {rate:.2f} GB/s"
