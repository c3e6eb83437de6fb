"""A rank without a model: it stamps and votes its way through made-up steps, and does what it is told at one place.

    beating_rank.py RANK SIZE PULSE_HUB CONTROL_HUB KEY DIRECTORY LIMITS SCENARIO      see groups.py

The hubs are descriptors of listening sockets on rank 0, ports on the others. Runs bare: no torch is imported.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from ep.errors import PeerFailed
from runtime.control.control import SocketControl
from runtime.control.stars import open_control
from runtime.failure.judge import Limits
from runtime.failure.pulse import Pulse
from runtime.failure.verdict import Phase

THROTTLE = """\
import os, signal, sys, time
pid, end, longest = int(sys.argv[1]), time.monotonic() + float(sys.argv[2]), 0.0
while time.monotonic() < end:
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.095)
    os.kill(pid, signal.SIGCONT)
    longest = max(longest, time.monotonic() - began)
    time.sleep(0.005)
print("stopped", longest, flush=True)
"""
"""Gives a process 5% of a core, and says for how long at most it was stopped at a time."""

PHASES = (Phase.COMMIT, Phase.LAUNCH, Phase.DISPATCH, Phase.COMBINE, Phase.SAMPLE, Phase.READ)


def act(deed: str, pulse: Pulse) -> None:
    """Do the deed, after having said when."""
    say("act", time.monotonic())
    name, _, value = deed.partition(" ")
    if name == "raise":
        raise ValueError("boom\nin two lines")
    if name == "second-hand":
        raise PeerFailed(int(value), "closed its link")
    if name == "exit":
        os._exit(int(value))
    if name == "leave":
        raise SystemExit(0)
    if name == "signal":
        os.kill(os.getpid(), signal.Signals[value])
    if name == "signal-pulse":
        os.kill(pulse.pid, signal.Signals[value])
    if name == "hang":
        threading.Event().wait()
    if name == "hold-gil":
        ctypes.PyDLL(None).usleep(int(float(value) * 1e6))
    if name == "sleep":
        time.sleep(float(value))
    if name == "stall":
        stall(float(value))
    if name == "throttle":
        subprocess.Popen([sys.executable, "-I", "-S", "-c", THROTTLE, str(os.getpid()), value])


def stall(seconds: float) -> None:
    """Wait for a file: a pipe that nobody opens for so long."""
    path = Path(sys.argv[6]) / "pipe"
    os.mkfifo(path)
    threading.Timer(seconds, path.write_bytes, [b"here it is"]).start()
    path.read_bytes()
    path.unlink()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def run(pulse: Pulse, control: SocketControl, scenario: dict) -> None:
    board, mine = pulse.board, scenario["ranks"].get(str(control.rank), {})

    def enter(phase: Phase, step: int) -> None:
        board.stamp(phase, step, 2 if phase in (Phase.DISPATCH, Phase.COMBINE) else 0)
        if [step, phase.name] == mine.get("at"):
            act(mine["deed"], pulse)

    for step in range(scenario["steps"]):
        enter(Phase.BETWEEN, step)
        enter(Phase.PROPOSE, step)
        enter(Phase.VOTE, step)
        rows = control.gather([step], sequence=step)
        board.wait()
        assert rows.wait() == [[step]] * control.size
        for phase in PHASES:
            enter(phase, step)
        time.sleep(scenario["step_s"])
    board.stamp(Phase.IDLE, scenario["steps"])


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    pulse_hub, control_hub = (
        socket.socket(fileno=int(hub)) if rank == 0 else ("127.0.0.1", int(hub)) for hub in sys.argv[3:5]
    )
    key, limits, scenario = bytes.fromhex(sys.argv[5]), Limits(**json.loads(sys.argv[7])), json.loads(sys.argv[8])
    pulse = Pulse.start(rank=rank, size=size, hub=pulse_hub, key=key, directory=Path(sys.argv[6]), limits=limits)
    say("pulse", pulse.pid)
    with pulse:
        if "early" in scenario["ranks"].get(str(rank), {}):
            act(scenario["ranks"][str(rank)]["early"], pulse)
        control = open_control(rank=rank, size=size, hub=control_hub, key=key, width=1)
        pulse.ready()
        say("ready", time.monotonic())
        run(pulse, control, scenario)
        say("done", time.monotonic())
        if "hold" in scenario:
            sys.stdin.readline()


main()
