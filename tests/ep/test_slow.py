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


def seconds_of(work) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_passes_what_any_transport_must(size: int):
    config = LinkConfig(link_latency_us=50, link_bytes_per_s=1e9)
    run_ranks(size, lambda transport: check_transport(SlowTransport(transport, config)), timeout_s=LIMIT_S)


@pytest.mark.parametrize(("rows", "expected_s"), [(0, 0.02), (10, 0.02 + 80e3 / 4e6), (1, 0.02 + 8e3 / 4e6)])
def test_a_wait_takes_latency_and_bytes_over_bandwidth(rows: int, expected_s: float):
    def run(bare: ThreadTransport) -> float:
        slow = SlowTransport(bare, LinkConfig(link_latency_us=20_000, link_bytes_per_s=4e6))
        return seconds_of(lambda: exchange(slow, rows=rows).wait())

    for taken_s in run_ranks(2, run, timeout_s=LIMIT_S):
        assert expected_s * 0.999 <= taken_s < expected_s + 0.1


def test_who_computes_meanwhile_waits_for_the_rest_only():
    def run(bare: ThreadTransport) -> tuple[float, float]:
        slow = SlowTransport(bare, LinkConfig(link_latency_us=60_000))
        exchange(slow, rows=1).wait()  # ranks that take turns start together from here
        pending = exchange(slow, rows=1, step=1)
        begin = time.monotonic()
        time.sleep(0.03)
        return seconds_of(pending.wait), time.monotonic() - begin

    for waited_s, whole_s in run_ranks(1, run, timeout_s=LIMIT_S):
        assert waited_s < 0.045
        assert whole_s >= 0.0595


def test_two_exchanges_share_the_link_and_not_the_latency():
    def run(bare: ThreadTransport) -> tuple[float, float]:
        slow = SlowTransport(bare, LinkConfig(link_latency_us=30_000, link_bytes_per_s=4e6))
        begin = time.monotonic()
        first, second = exchange(slow, rows=10), exchange(slow, rows=10, step=1)  # 80 kB to the other rank: 20 ms
        first.wait()
        first_s = time.monotonic() - begin
        second.wait()
        return first_s, time.monotonic() - begin

    for first_s, second_s in run_ranks(2, run, timeout_s=LIMIT_S):
        assert 0.0499 <= first_s < 0.09
        assert 0.0699 <= second_s < 0.11


def test_rows_that_leave_late_arrive_late_on_every_rank():
    def run(bare: ThreadTransport) -> float:
        slow = SlowTransport(bare, LinkConfig(link_latency_us=20_000))
        begin = time.monotonic()
        if slow.rank == 1:
            time.sleep(0.05)
        exchange(slow, rows=1).wait()
        return time.monotonic() - begin

    assert all(taken_s >= 0.0695 for taken_s in run_ranks(2, run, timeout_s=LIMIT_S))


class OneOfTwo:
    """Rank 0, whose neighbour's rows leave 40 ms after its own."""

    rank, size = 0, 2

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag):
        return Pending.ready(recv)

    def all_gather(self, row, *, tag):
        return Pending.ready(torch.stack([row, row + 40_000_000]))


def test_who_sends_nothing_waits_for_rows_that_leave_later():
    slow = SlowTransport(OneOfTwo(), LinkConfig(link_latency_us=1000))  # type: ignore[arg-type]
    none = torch.zeros(0, 1)
    pending = slow.all_to_all(none, none, recv_splits=[0, 0], send_splits=[0, 0], tag=Tag(0, 0, 0, 0, Kind.CHECK))
    assert seconds_of(pending.wait) >= 0.0405


def test_a_second_wait_takes_no_time():
    def run(bare: ThreadTransport) -> float:
        slow = SlowTransport(bare, LinkConfig(link_latency_us=30_000))
        pending = exchange(slow, rows=1)
        pending.wait()
        return seconds_of(pending.wait)

    assert max(run_ranks(2, run, timeout_s=LIMIT_S)) < 0.01


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
    begin, wall = clock.now(), time.monotonic()
    time.sleep(0.05)
    assert clock.now() - begin < 40e6, "others may have the core"
    clock.wait_until(begin + 10**12)
    assert clock.now() >= begin + 10**12
    clock.wait_until(begin)
    assert time.monotonic() - wall < 10.0
    while time.thread_time_ns() < begin + 2 * 10**6:
        pass
    assert clock.now() >= begin + 10**12 + 10**6, "work counts"


def test_ranks_by_their_own_clocks_wait_as_long_as_the_slowest_link_takes():
    def run(bare: ThreadTransport) -> float:
        clock = CoreClock()
        slow = SlowTransport(bare, LinkConfig(link_latency_us=3_000_000, link_bytes_per_s=4e3), clock=clock)
        begin = clock.now()
        exchange(slow, rows=1).wait()
        return (clock.now() - begin) / 1e9

    begin = time.monotonic()
    for took_s in run_ranks(2, run, timeout_s=LIMIT_S):
        assert 4.9 < took_s < 5.5
    assert time.monotonic() - begin < 4.0, "nobody slept"
