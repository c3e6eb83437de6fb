"""What an exchange takes, against the transport's own all-to-all of the same bytes.

    measured once     which all-to-alls one round makes, and of how many bytes to whom
    then in turns     plain: those all-to-alls, of memory that lies ready | the exchange: dispatch, combine

Between the two the experts are stood in for by a copy, which is not timed. Every rank calls measure() at the same time.
Knows no printing and no hardware.

Legend: T tokens, K top-k.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import ExchangeConfig
from .exchange import Exchange
from .rows import wide
from .subgroup import ExchangeBytes
from .terms import Terms
from .topology import Topology
from .transport import Kind, Pending, Tag, Transport
from .wrapping import Wrapping

WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every rank sends: uniform random routing."""

    tokens: int
    hidden: int
    num_slots: int
    top_k: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTimes:
    """Medians of one rank, in microseconds; of dispatch and combine together."""

    whole_us: float
    """Wall time."""
    wire_us: float
    """Wall time inside the transport, waits for other ranks included."""
    plain_us: float
    """Wall time of the plain all-to-alls."""
    packing_cpu_us: float
    """CPU time of this thread outside of the transport: index math, packing, weighing and adding."""
    sent: ExchangeBytes
    """Bytes of one dispatch and combine."""


@dataclass(slots=True, eq=False)
class _Call:
    """One all-to-all, to be made again with memory that lies ready."""

    recv: Tensor
    send: Tensor
    recv_splits: Sequence[int]
    send_splits: Sequence[int]


class Timed(Wrapping):
    """A transport that notes what it is called for and how long that takes."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls: list[_Call] = []
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        self.calls.append(_Call(recv, send, recv_splits, send_splits))
        pending = self._timed(
            lambda: self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        )
        return Pending(lambda: self._timed(pending.wait))

    def clear(self) -> None:
        """Forget what was noted."""
        self.calls, self.wall_s, self.cpu_s = [], 0.0, 0.0

    def _timed(self, call: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        value = call()
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.thread_time() - cpu
        return value


def measure(
    transport: Transport, load: Load, *, config: ExchangeConfig, topology: Topology, rounds: int, tags: Iterator[Tag]
) -> list[ExchangeTimes]:
    """Times of all ranks, in rank order. `config` is settled; its round_tokens hold the load's tokens."""
    bench = _Bench(transport, load, config=config, topology=topology, tags=tags)
    plain_s, exchange_s = [], []
    for _ in range(WARM_UP):
        bench.exchange()
    calls = bench.plain_calls()
    for _ in range(rounds):
        plain_s.append(bench.plain(calls))
        exchange_s.append(bench.exchange())
    whole, wire, packing = (1e6 * statistics.median(times) for times in zip(*exchange_s, strict=True))
    sent = bench.sent
    row = torch.tensor([whole, wire, 1e6 * statistics.median(plain_s), packing, *sent], dtype=torch.float64)
    table = transport.all_gather(row, tag=next(tags)).wait().tolist()
    return [
        ExchangeTimes(
            whole_us=whole,
            wire_us=wire,
            plain_us=plain,
            packing_cpu_us=packing,
            sent=ExchangeBytes(network=int(network), node=int(node)),
        )
        for whole, wire, plain, packing, network, node in table
    ]


class _Bench:
    """One exchange and the plain calls beside it."""

    def __init__(
        self, transport: Transport, load: Load, *, config: ExchangeConfig, topology: Topology, tags: Iterator[Tag]
    ) -> None:
        self._timed = Timed(transport)
        self._transport = transport
        self._tags = tags
        self._terms = Terms(bucket=load.tokens)
        self._exchange = Exchange(
            self._timed,
            num_slots=load.num_slots,
            hidden=load.hidden,
            top_k=load.top_k,
            dtype=load.dtype,
            device="cpu",
            config=config,
            topology=topology,
        )
        generator = torch.Generator().manual_seed(transport.rank)
        self._x_TD = torch.randn(load.tokens, load.hidden, generator=generator).to(load.dtype)
        chances = torch.rand(load.tokens, load.num_slots, generator=generator)
        self._slots_TK = chances.topk(load.top_k, dim=1).indices
        self._weights_TK = torch.rand(load.tokens, load.top_k, generator=generator).to(wide(load.dtype))
        self.sent = ExchangeBytes(network=0, node=0)

    def exchange(self) -> tuple[float, float, float]:
        """Seconds of one dispatch and combine: (wall, wall in the transport, CPU outside of it)."""
        self._timed.clear()
        tag = next(self._tags)
        there = self._parts(
            lambda: self._exchange.dispatch(
                self._x_TD, self._slots_TK, self._weights_TK, tag=tag, terms=self._terms
            ).wait()
        )
        arrivals = there[0]
        y_MD = arrivals.x_ND[arrivals.rows_M]
        back = self._parts(lambda: self._exchange.combine(y_MD, arrivals, tag=tag).wait())
        self.sent = self._exchange.take_bytes()
        return there[1] + back[1], self._timed.wall_s, there[2] + back[2] - self._timed.cpu_s

    def plain_calls(self) -> list[_Call]:
        """What the last exchange called for, with memory of its own."""
        return [
            _Call(torch.zeros_like(call.recv), torch.zeros_like(call.send), call.recv_splits, call.send_splits)
            for call in self._timed.calls
        ]

    def plain(self, calls: Sequence[_Call]) -> float:
        """Seconds of the plain all-to-alls, one after the other."""
        self._gather()
        begin = time.perf_counter()
        for call in calls:
            self._transport.all_to_all(
                call.recv, call.send, recv_splits=call.recv_splits, send_splits=call.send_splits, tag=next(self._tags)
            ).wait()
        return time.perf_counter() - begin

    def _parts(self, run: Callable[[], Any]) -> tuple[Any, float, float]:
        """(value, wall, CPU) of `run`, begun by all ranks together."""
        self._gather()
        wall, cpu = time.perf_counter(), time.thread_time()
        value = run()
        return value, time.perf_counter() - wall, time.thread_time() - cpu

    def _gather(self) -> None:
        self._transport.all_gather(torch.zeros(1), tag=next(self._tags)).wait()


def bench_tags() -> Iterator[Tag]:
    """Tags for one run of any number of measurements."""
    return (Tag(step, 0, 0, 0, Kind.CHECK) for step in itertools.count())
