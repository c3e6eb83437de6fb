"""The pulse as a process: what it weighs, what it touches, what it is told, and what a rank alone gets from it."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from ep import PeerFailed
from runtime.control.door import Door, open_listener
from runtime.failure.bare import bare_script
from runtime.failure.board import Stamp
from runtime.failure.judge import Limits
from runtime.failure.pulse import Pulse, blame
from runtime.failure.pulse_process import OwnClock, PulseConfig
from runtime.failure.pulse_star import _terms
from runtime.failure.verdict import BEFORE_STEPS, UNKNOWN_STEP, Phase, Reason
from runtime.scheduling.heartbeat import Disagreement
from tests.runtime.groups import KEY, Group


def test_a_pulse_is_small_has_no_torch_and_listens_nowhere(tmp_path):
    group = Group.start(tmp_path, {"steps": 3, "hold": True}, size=2)
    try:
        end = time.monotonic() + 30
        while not all(group.heard(rank, "done") for rank in (0, 1)) and time.monotonic() < end:
            time.sleep(0.01)
        for rank in (0, 1):
            [pid] = group.heard(rank, "pulse")
            proc = Path(f"/proc/{int(pid)}")
            assert "torch" not in (proc / "maps").read_text()
            [resident_kb] = [
                int(line.split()[1]) for line in (proc / "status").read_text().splitlines() if line.startswith("VmRSS")
            ]
            assert resident_kb < 40_000
            sockets = {link.readlink().name for link in (proc / "fd").iterdir() if link.is_symlink()}
            table = [line.split() for line in (proc / "net/tcp").read_text().splitlines()[1:]]
            own = [line for line in table if f"socket:[{line[9]}]" in sockets]
            assert own, "it has a link to the other one"
            assert all(line[1].startswith("0100007F") for line in own), "on loopback only"
            assert not [line for line in own if line[3] == "0A"], "nothing listens once all have come"
    finally:
        for process in group.processes:
            process.stdin.close()
    group.join(30)
    assert group.codes == [0, 0]


OPENS = """\
import os, socket, sys, threading, time
from pathlib import Path
from runtime.failure.board import Board, State
from runtime.control.door import Door, open_listener
from runtime.failure.judge import Limits
from runtime.failure.pulse_process import PulseConfig, PulseProcess

board = Board.create(rank=0, size=1)
mine, theirs = socket.socketpair()
limits = Limits(beat_s=0.02)
config = PulseConfig(key=bytes(32), hub=None, directory=Path(sys.argv[1]), limits=limits)
process = PulseProcess(board, theirs, config, open_listener("lo"))
star = process._join()
opened = []
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "import"):
        opened.append((event, arguments[0]))
def end():
    time.sleep(0.5)
    board.state = State.ENDED
    mine.send(b"!")
threading.Thread(target=end).start()
board.stamp(2, 0)
sys.addaudithook(hook)
verdict = process.watch(star)
print(verdict, opened, flush=True)
os._exit(0)
"""


def test_a_pulse_opens_no_file_while_it_watches(tmp_path):
    program = tmp_path / "opens.py"
    program.write_text(OPENS)
    said = subprocess.run(bare_script(program, str(tmp_path)), capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "None []\n"


ALONE = """\
import sys
from pathlib import Path
from runtime.control.door import Door, open_listener
from runtime.failure.pulse import Pulse
from runtime.failure.verdict import Phase

def told(verdict):
    print("told", verdict, flush=True)

with Pulse.start(
    rank=0, size=1, hub=open_listener("lo"), key=bytes(32), directory=None, on_verdict=told
) as pulse:
    pulse.warm()
    pulse.ready()
    pulse.board.stamp(Phase.READ, 4)
    pulse.drain()
    if sys.argv[1] == "fail":
        pulse.fail(KeyError("x"), step=9, phase=Phase.COMMIT)
    raise SystemExit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("0", 0, ""),
        ("3", 1, "told rank 0 failed in step 4, read: raised SystemExit: 3\n"),
        ("fail", 1, "told rank 0 failed in step 9, commit: raised KeyError: 'x'\n"),
    ],
)
def test_a_rank_alone_has_a_pulse_like_any_other_and_its_owner_hears_the_verdict(tmp_path, how, code, told):
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    ended = subprocess.run(bare_script(program, how), capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, told), ended.stderr
    assert ended.stderr == ("" if code == 0 else f"serried: {told.removeprefix('told ').strip()} [rank 0 ends]\n")


def test_a_rank_with_another_key_is_refused_and_ends(tmp_path):
    """It says why; the hub goes on waiting for the real rank 1, and ends when its own rank does."""
    hub = open_listener("lo")
    address = hub.getsockname()
    program = tmp_path / "stranger.py"
    program.write_text(
        "import sys\n"
        "from runtime.failure.pulse import Pulse\n"
        "hub = '127.0.0.1', int(sys.argv[1])\n"
        "with Pulse.start(rank=1, size=2, hub=hub, key=b'x' * 32, directory=None) as pulse:\n"
        "    pulse.ready()\n"
    )
    threads = threading.Thread(target=_host_once, args=(hub,))
    threads.start()
    stranger = subprocess.run(
        bare_script(program, str(address[1])), capture_output=True, text=True, check=False, timeout=60
    )
    threads.join(20)
    assert stranger.returncode == 1
    assert "rank 1 failed: its pulse found no hub: the host does not hold this group's key" in stranger.stderr


def _host_once(listener) -> None:
    """A hub's door, until one caller was refused."""
    door = Door(listener, rank=0, terms=_terms(2), key=KEY, waits_for={1})
    end = time.monotonic() + 20
    while not door.refusals and time.monotonic() < end:
        door.admit(0.05)
    door.close()


def test_only_rank_0_listens_and_the_key_is_long_enough():
    with open_listener("lo") as listener, pytest.raises(ValueError, match="rank 0 gives the socket"):
        Pulse.start(rank=1, size=2, hub=listener, key=KEY, directory=None)
    with pytest.raises(ValueError, match="rank 0 gives the socket"):
        Pulse.start(rank=0, size=2, hub=("127.0.0.1", 1), key=KEY, directory=None)
    with pytest.raises(ValueError, match="key has 2 bytes"):
        Pulse.start(rank=1, size=2, hub=("127.0.0.1", 1), key=b"ab", directory=None)


STAMP = Stamp(0, 0, 17, Phase.DISPATCH, 2, 5, waits=False)


def test_an_exception_is_blamed_on_its_rank_where_it_stands():
    verdict = blame(ValueError("boom\nboom"), rank=3, stamp=STAMP)
    assert str(verdict) == "rank 3 failed in step 17, dispatch of layer 2: raised ValueError: boom boom"
    assert blame(ValueError(), rank=3, stamp=None).step == BEFORE_STEPS
    assert str(blame(ValueError(), rank=3, stamp=STAMP, phase=Phase.READ)) == (
        "rank 3 failed in step 17, read: raised ValueError"
    )


def test_an_error_of_the_transport_is_blamed_on_whom_it_names():
    verdict = blame(PeerFailed(1, "closed its link", rank=3), rank=3, stamp=STAMP)
    assert (verdict.culprit, verdict.reason, verdict.step) == (1, Reason.LOST, UNKNOWN_STEP)
    assert verdict.cause == "rank 3 raised PeerFailed: rank 3: rank 1 closed its link"


def test_ranks_that_disagree_all_blame_the_same_one():
    error = Disagreement("rank 2 says 7, rank 0 says 8", field="epoch", culprit=2, step=17)
    assert [blame(error, rank=rank, stamp=STAMP).culprit for rank in range(4)] == [2, 2, 2, 2]


def test_a_config_comes_back_from_its_bytes():
    for hub in (None, ("127.0.0.1", 4711)):
        config = PulseConfig(key=KEY, hub=hub, directory=Path("/somewhere"), limits=Limits(stuck_s=3))
        assert PulseConfig.from_bytes(config.to_bytes()) == config


def test_the_pulses_clock_stands_still_while_the_pulse_does(monkeypatch):
    now = [50.0]
    monkeypatch.setattr("runtime.failure.pulse_process.time.monotonic", lambda: now[0])
    clock = OwnClock(longest_s=1.0)
    for elapsed, counted in ((0.25, 0.25), (30.0, 1.0), (0.5, 0.5)):
        now[0] += elapsed
        assert clock.tick() == counted
    assert clock.now == 1.75
