"""A transport made slower: latency and a limited bandwidth, so that overlap can be measured where no network is.

    rank 0 sends 3 MB at t = 0, then 3 MB at t = 1 ms; 1 GB/s, latency 0.5 ms
        its link is busy 0 .. 3 ms and 3 .. 6 ms; what it sent is there at 3.5 ms and 6.5 ms

Every rank says when its rows have left, and wait() sleeps for what is left until the slowest of them have arrived: a
rank that comes late to its wait sleeps less, or not at all. Ranks must share a clock: one machine. Or each has one of
its own (`CoreClock`), which stands still while other work has its core; no clock then is ahead of what it has heard of
the others. Rows to itself are free. Knows nothing of what is sent.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from .transport import Pending, Tag, Transport
from .wrapping import Wrapping


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The network that a rank is to seem to have."""

    link_latency_us: float = 0.0
    """Microseconds that rows are under way, however few they are."""

    link_bytes_per_s: float | None = None
    """Bytes a second that a rank sends, its exchanges one after the other; unset: no limit."""

    def __post_init__(self) -> None:
        if not (isfinite(self.link_latency_us) and self.link_latency_us >= 0):
            raise ValueError(f"link_latency_us is {self.link_latency_us}; it must be at least 0, e.g. 100")
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise ValueError(
                f"link_bytes_per_s is {reprlib.repr(self.link_bytes_per_s)}; it must be above 0, e.g. 50000000000"
            )

    @property
    def is_slow(self) -> bool:
        """Whether there is anything to wait for."""
        return self.link_latency_us > 0 or self.link_bytes_per_s is not None


class Clock(Protocol):
    """Nanoseconds that never go back."""

    def now(self) -> int: ...

    def wait_until(self, there_ns: int) -> None:
        """It is at least that late afterwards."""
        ...


class WallClock:
    """The machine's."""

    def now(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, there_ns: int) -> None:
        time.sleep(max(there_ns - self.now(), 0) / 1e9)


class CoreClock:
    """Of a rank as if it had a core to itself: this thread's processor time, and what it waited for. Nothing sleeps."""

    def __init__(self) -> None:
        self._waited_ns = 0

    def now(self) -> int:
        return time.thread_time_ns() + self._waited_ns

    def wait_until(self, there_ns: int) -> None:
        self._waited_ns += max(there_ns - self.now(), 0)


class SlowTransport(Wrapping):
    """A transport behind a slow link; see `Transport`. Each exchange costs one gather of a number more.

    num_bytes   that this rank has sent to others
    """

    def __init__(self, transport: Transport, config: LinkConfig, *, clock: Clock | None = None) -> None:
        """clock: None, the machine's."""
        super().__init__(transport)
        self._clock = clock or WallClock()
        self._latency_ns = round(config.link_latency_us * 1000)
        self._ns_per_byte = 0.0 if config.link_bytes_per_s is None else 1e9 / config.link_bytes_per_s
        self._free_ns = 0
        self.num_bytes = 0

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        leaving = send.shape[0] - send_splits[self.rank]
        row_bytes = send.nbytes // send.shape[0] if send.shape[0] else 0
        rows = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return self._slowed(rows, leaving * row_bytes, tag, send.device)

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        rows = self._transport.all_gather(row, tag=tag)
        return self._slowed(rows, (self.size - 1) * row.nbytes, tag, row.device)

    def _slowed(self, rows: Pending[Tensor], num_bytes: int, tag: Tag, device: torch.device) -> Pending[Tensor]:
        self.num_bytes += num_bytes
        self._free_ns = max(self._clock.now(), self._free_ns) + round(num_bytes * self._ns_per_byte)
        left_R1 = self._transport.all_gather(torch.tensor([self._free_ns], device=device), tag=tag)
        return Pending(lambda: self._wait(rows, left_R1))

    def _wait(self, rows: Pending[Tensor], left_R1: Pending[Tensor]) -> Tensor:
        value = rows.wait()
        there_ns = int(left_R1.wait().max()) + self._latency_ns
        self._clock.wait_until(there_ns)
        return value
