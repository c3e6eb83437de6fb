"""Times of a start, and what was read: phases without a gap, the kernel's own counters."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from runtime.weights.startup import KernelReads, LoadReport, StartupTimes, process_began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [100.0]
    monkeypatch.setattr("runtime.weights.startup.time.monotonic", lambda: now[0])
    return now


def test_phases_follow_each_other_without_a_gap(clock: list[float]) -> None:
    times = StartupTimes(began=98.0)
    for phase, at in (("import", 100.5), ("load", 101.0), ("warm-up", 101.25), ("load", 102.25)):
        clock[0] = at
        times.mark(phase)
    assert times.seconds == {"import": 2.5, "load": 1.5, "warm-up": 0.25}
    assert times.total == 4.25
    assert times.line() == "ready in 4.25 s: import 2.50, load 1.50, warm-up 0.25"


def test_a_start_may_begin_now(clock: list[float]) -> None:
    times = StartupTimes()
    clock[0] = 101.0
    times.mark("load")
    assert times.seconds == {"load": 1.0}


def test_a_process_knows_when_it_began() -> None:
    age = time.time() - psutil.Process().create_time()  # psutil knows the boot to a second
    assert time.monotonic() - process_began() == pytest.approx(age, abs=1.2)


def test_the_kernel_counts_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(3_000_000))
    before = KernelReads.now()
    with (tmp_path / "x").open("rb", buffering=0) as stream:
        assert stream.readinto(bytearray(3_000_000)) == 3_000_000
    after = KernelReads.now()
    assert before is not None
    assert after is not None
    difference = after.since(before)
    assert 3_000_000 <= difference.bytes < 3_010_000
    assert 1 <= difference.calls < 10


def test_a_kernel_that_does_not_tell_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise PermissionError("not for you")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert KernelReads.now() is None


def test_a_report_says_what_a_rank_and_its_node_read() -> None:
    kernel = KernelReads(bytes=600 << 20, calls=12, disk=0)
    report = LoadReport(
        bytes_read=500_000_000, seconds=0.5, kernel=kernel, num_ranks=4, node_bytes=2_000_000_000, node_seconds=0.8
    )
    assert report.lines() == [
        "read 0.47 GiB in 0.50 s, 1.00 GB/s",
        "  kernel: 0.59 GiB in 12 calls, 0 B from storage",
        "  node: 1.86 GiB in 0.80 s, 2.50 GB/s by 4 ranks",
    ]
