"""A front door that is told to end before its ranks are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.service import front_door

pytestmark = pytest.mark.timeout(240)

RANK0 = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
def is_caught(number):
    lines = open(f"/proc/{os.getppid()}/status").read().splitlines()
    [caught] = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return caught >> (number - 1) & 1
while not is_caught(signal.SIGTERM):
    time.sleep(0.01)
os.kill(os.getppid(), int(sys.argv[2]))
time.sleep(60)
"""


async def nothing(*_: object) -> None:
    raise AssertionError("there is nothing to serve")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_ranks_start_ends_them_too_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
):
    monkeypatch.setattr(front_door, "this_program", lambda: [sys.executable, "-I", "-S", "-c", RANK0])
    began, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    assert front_door.run([str(tmp_path / "pid"), str(int(number))], nothing) == code
    assert time.monotonic() - began < 40.0, "rank 0 would go on for 60 s"
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_signal_while_rank_0_is_being_started_loses_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It comes when the process is there and nobody has its name yet."""
    started = []

    def start(*words: object, **more: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(front_door, "start_process", start)
    before = signal.getsignal(signal.SIGTERM)
    assert front_door.run(["serve"], nothing) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert started[0].poll() is not None
