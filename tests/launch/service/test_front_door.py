"""A front door that is told to end before its ranks are there."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launch.service import front_door

pytestmark = pytest.mark.timeout(30)

RANK0 = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(0.2)
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
    assert time.monotonic() - began < 10.0
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
