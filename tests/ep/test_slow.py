"""A slow link: right rows, the time that its numbers say, and none of it for who comes late to the wait."""

from __future__ import annotations

import time

import pytest
import torch

from ep import Kind, Pending, Tag, ThreadTransport, run_ranks
from ep.conformance import check_transport
from ep.slow import CoreClock, LinkConfig, SlowTransport

LIMIT_S = 20.0


def exchange(transport, *, rows: int, step: int = 0):
    """Start an exchange of so many float64 rows of 1000 to every rank."""
    send = torch.full((rows * transport.size, 1000), float(transport.rank), dtype=torch.float64)
    splits = [rows] * transport.size
    tag = Tag(step, 0, 0, 0, Kind.CHECK)
    return transport.all_to_all(torch.empty_like(send), send, recv_splits=splits, send_splits=splits, tag=tag)


class Stepped:
    """A rank's own clock: it moves when it is told to, and when somebody waits."""

    def __init__(self) -> None:
        self.now_ns = 0

    def now(self) -> int:
        return self.now_ns

    def wait_until(self, there_ns: int) -> None:
        self.now_ns = max(self.now_ns, there_ns)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_passes_what_any_transport_must(size: int):
    config = LinkConfig(link_latency_us=50, link_bytes_per_s=1e9)
    run_ranks(size, lambda transport: check_transport(SlowTransport(transport, config)), timeout_s=LIMIT_S)


@pytest.mark.parametrize(("rows", "expected_us"), [(0, 20_000), (10, 20_000 + 20_000), (1, 20_000 + 2000)])
def test_a_wait_takes_latency_and_bytes_over_bandwidth(rows: int, expected_us: int):
    """Of 8 kB a row at 4 MB/s."""

    def run(bare: ThreadTransport) -> int:
        clock = Stepped()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=20_000, link_bytes_per_s=4e6), clock=clock)
        exchange(slow, rows=rows).wait()
        return clock.now_ns

    assert run_ranks(2, run, timeout_s=LIMIT_S) == [1000 * expected_us] * 2


def test_who_computes_meanwhile_waits_for_the_rest_only():
    def run(bare: ThreadTransport) -> tuple[int, int]:
        clock = Stepped()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=60), clock=clock)
        short, long = exchange(slow, rows=1), exchange(slow, rows=1, step=1)
        clock.now_ns += 25_000
        short.wait()
        waited_ns = clock.now_ns
        clock.now_ns += 40_000
        long.wait()
        return waited_ns, clock.now_ns

    assert run_ranks(2, run, timeout_s=LIMIT_S) == [(60_000, 100_000)] * 2


def test_two_exchanges_share_the_link_and_not_the_latency():
    def run(bare: ThreadTransport) -> tuple[int, int]:
        clock = Stepped()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=30_000, link_bytes_per_s=4e6), clock=clock)
        first, second = exchange(slow, rows=10), exchange(slow, rows=10, step=1)  # 80 kB to the other rank: 20 ms
        first.wait()
        first_ns = clock.now_ns
        second.wait()
        return first_ns, clock.now_ns

    assert run_ranks(2, run, timeout_s=LIMIT_S) == [(50_000_000, 70_000_000)] * 2


def test_rows_that_leave_late_arrive_late_on_every_rank():
    def run(bare: ThreadTransport) -> int:
        clock = Stepped()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=20_000), clock=clock)
        if slow.rank == 1:
            clock.now_ns += 50_000_000
        exchange(slow, rows=1).wait()
        return clock.now_ns

    assert run_ranks(2, run, timeout_s=LIMIT_S) == [70_000_000] * 2


def test_by_the_machines_clock_a_wait_is_slept_through():
    def run(bare: ThreadTransport) -> float:
        slow = SlowTransport(bare, LinkConfig(link_latency_us=30_000))
        begin, busy = time.monotonic(), time.thread_time()
        exchange(slow, rows=1).wait()
        assert time.thread_time() - busy < 0.025
        return time.monotonic() - begin

    assert min(run_ranks(2, run, timeout_s=LIMIT_S)) >= 0.0299


class OneOfTwo:
    """Rank 0, whose neighbour's rows leave 40 ms after its own."""

    rank, size = 0, 2

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        return Pending.ready(recv)

    def all_gather(self, row, *, tag):
        return Pending.ready(torch.stack([row, row + 40_000_000]))


def test_who_sends_nothing_waits_for_rows_that_leave_later():
    clock = Stepped()
    slow = SlowTransport(OneOfTwo(), LinkConfig(link_latency_us=1000), clock=clock)  # type: ignore[arg-type]
    none = torch.zeros(0, 1)
    pending = slow.all_to_all(none, none, recv_splits=[0, 0], send_splits=[0, 0], tag=Tag(0, 0, 0, 0, Kind.CHECK))
    pending.wait()
    assert clock.now_ns == 41_000_000


def test_a_second_wait_takes_no_time():
    def run(bare: ThreadTransport) -> tuple[int, int]:
        clock = Stepped()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=30_000), clock=clock)
        pending = exchange(slow, rows=1)
        pending.wait()
        clock.now_ns = 0
        pending.wait()
        return clock.now_ns, slow.num_bytes

    assert run_ranks(2, run, timeout_s=LIMIT_S) == [(0, 8000)] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"link_latency_us": -1.0}, "link_latency_us is -1.0; it must be at least 0, e.g. 100"),
        ({"link_latency_us": float("nan")}, "link_latency_us is nan"),
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s is 0.0; it must be above 0"),
    ],
)
def test_an_impossible_link_is_refused(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LinkConfig(**values)


def test_a_link_without_limits_is_not_slow():
    assert not LinkConfig().is_slow
    assert LinkConfig(link_latency_us=1).is_slow
    assert LinkConfig(link_bytes_per_s=1e9).is_slow


def test_a_clock_of_its_own_core_runs_with_its_work_and_its_links_and_does_not_sleep():
    clock = CoreClock()
    begin = clock.now()
    time.sleep(0.05)
    assert clock.now() - begin < 40e6, "others may have the core"
    clock.wait_until(begin + 10**12)
    assert clock.now() >= begin + 10**12
    clock.wait_until(begin)
    while time.thread_time_ns() < begin + 2 * 10**6:
        pass
    assert clock.now() >= begin + 10**12 + 10**6, "work counts"


def test_ranks_by_their_own_clocks_wait_as_long_as_the_slowest_link_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ep.slow.time.sleep", None)  # nobody sleeps

    def run(bare: ThreadTransport) -> float:
        clock = CoreClock()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=3_000_000, link_bytes_per_s=4e3), clock=clock)
        begin = clock.now()
        exchange(slow, rows=1).wait()
        return (clock.now() - begin) / 1e9

    for took_s in run_ranks(2, run, timeout_s=LIMIT_S):
        assert 4.9 < took_s < 5.5
