"""serried's own launcher, with processes that only meet (`programs/ranks.py`), and what becomes of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launch.groups.as_rank import GRACE_S, MarkedLines
from launch.groups.invitation import Invitation
from launch.groups.spawn import start_ranks

PROGRAM = str(Path(__file__).parents[1] / "programs" / "ranks.py")


class Group:
    """Four processes that have met; the first is this test's child, in a process group of its own."""

    def __init__(self, deed: str) -> None:
        self.first = subprocess.Popen(
            [sys.executable, "-P", PROGRAM, '{"ranks": 4}', deed],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def meet(self) -> list[psutil.Process]:
        """The processes in rank order, once they have met."""
        assert self.first.stdout is not None
        self.told = json.loads(self.first.stdout.readline())
        self.processes = [psutil.Process(rank["pid"]) for rank in self.told]
        return self.processes

    def end(self, *, within_s: float = 60.0) -> tuple[int, str, str]:
        """Exit code, rest of standard output, standard error."""
        out, err = self.first.communicate(timeout=within_s)
        return self.first.returncode, out, err


@pytest.fixture
def group():
    """group(deed) -> Group; at the end none of its processes is left."""
    groups: list[Group] = []

    def start(deed: str) -> Group:
        groups.append(Group(deed))
        return groups[-1]

    yield start
    left = [process for one in groups for process in getattr(one, "processes", [])]
    for one in groups:
        with suppress(ProcessLookupError):
            os.killpg(one.first.pid, signal.SIGKILL)
        one.first.communicate(timeout=10)
    psutil.wait_procs(left, timeout=10)


def gone_after(processes: list[psutil.Process], *, limit_s: float) -> float:
    """Seconds until all have ended; fails with the ones that are left after `limit_s`."""
    begin = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    assert alive == []
    return time.monotonic() - begin


def until(true: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_four_processes_meet_speak_through_the_first_and_end(group):
    four = group("finish")
    four.meet()
    code, out, err = four.end()
    assert (code, json.loads(out)) == (0, {})
    assert [rank["says"].split(",")[0] for rank in four.told] == [
        f"own launcher: rank {rank} of 4" for rank in range(4)
    ]
    assert len({rank["key"] for rank in four.told}) == 1
    assert [rank["torch"] for rank in four.told] == [False] * 4
    assert [rank["threads"] for rank in four.told[1:]] == ["1", "1", "1"]
    assert sorted(err.splitlines()) == [
        "[rank 1] finish on 1",
        "[rank 2] finish on 2",
        "[rank 3] finish on 3",
        "finish on 0",
    ]


def test_no_secret_is_on_a_command_line_or_in_the_environment_and_no_socket_is_open_to_others(group):
    four = group("wait")
    first, *others = four.meet()
    for rank, process in enumerate(others, start=1):
        flag, place, descriptor, *rest = process.cmdline()[3:]
        assert (flag, place, rest) == ("--as-rank", f"{rank}/4", ['{"ranks": 4}', "wait"])
        assert int(descriptor) > 2
        added = set(process.environ().items()) - set(first.environ().items())
        assert {name for name, _ in added} <= {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH"}
    listening = {
        connection.laddr.ip
        for process in (first, *others)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_when_the_first_is_killed_while_they_start_nobody_is_left(group):
    four = group("wait")
    first, *others = four.meet()
    first.kill()
    gone_after(others, limit_s=30.0)
    assert "the process of rank 0 is gone" not in four.end()[2], "nobody lived through the grace"


def test_when_the_first_is_killed_later_the_others_have_a_moment_to_report_even_one_that_was_stopped(group):
    four = group("outlive")
    first, *others = four.meet()
    others[1].suspend()
    until(lambda: others[1].status() == psutil.STATUS_STOPPED)
    first.kill()
    first.wait(10)
    assert gone_after(others, limit_s=GRACE_S + 40.0) > 0.5 * GRACE_S
    assert four.end()[2].count("the process of rank 0 is gone") == 3


def test_a_killed_rank_is_told_apart_from_those_that_ended_well(group):
    four = group("wait-on-2")
    processes = four.meet()
    processes[2].kill()
    code, out, _ = four.end()
    assert (code, json.loads(out)) == (0, {"2": "killed by SIGKILL"})
    gone_after(processes, limit_s=30.0)


def test_a_rank_that_ends_with_an_error_is_told(group):
    four = group("fail-on-2")
    four.meet()
    code, out, _ = four.end()
    assert (code, json.loads(out)) == (0, {"2": "exit code 7"})


def test_a_rank_that_does_not_end_is_killed_after_a_grace(group):
    four = group("wait-on-1")
    four.meet()
    _, out, _ = four.end()
    assert json.loads(out) == {"1": "did not end within 1 s and was killed"}


def test_an_interrupt_reaches_the_first_alone_and_ends_all(group):
    four = group("wait")
    processes = four.meet()
    os.killpg(four.first.pid, signal.SIGINT)
    code, _, err = four.end()
    assert code == -signal.SIGINT
    gone_after(processes, limit_s=30.0)
    assert "KeyboardInterrupt" in err
    assert not any(line.startswith("[rank") and "KeyboardInterrupt" in line for line in err.splitlines())


def test_an_error_on_the_first_ends_all(group):
    four = group("raise")
    processes = four.meet()
    code, _, err = four.end()
    assert (code, "RuntimeError: planted" in err) == (1, True)
    gone_after(processes, limit_s=30.0)


def test_a_rank_that_ends_before_the_meeting_is_named_and_nobody_waits_for_it(group):
    four = group("exit-early")
    code, _, err = four.end()
    assert code == 1
    causes = {line.partition("PeerFailed: ")[2] for line in err.splitlines() if "PeerFailed: " in line}
    assert "rank 0: rank 2 ended while the group was starting: exit code 3" in causes
    # who had not come when rank 0 gave up finds nobody there
    assert all("rank 2 ended" in cause or "rank 0 was not met" in cause for cause in causes)
    assert [process for process in psutil.process_iter() if session(process.pid) == four.first.pid] == []


def session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_a_program_that_cannot_be_started_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError):
        start_ranks([], size=3, invitation=Invitation(host="127.0.0.1", port=1, key=b"k" * 32), command=["/no/such"])


def test_lines_of_a_rank_carry_its_mark_and_are_written_whole():
    read, write = os.pipe()
    stream = MarkedLines("[rank 2] ", write)
    for text in ("one\ntwo", "", " more\n", "\n", "three"):
        print(text, end="", file=stream)
    stream.flush()
    stream.close()
    stream.close()
    os.close(write)
    with os.fdopen(read, "rb") as file:
        assert file.read() == b"[rank 2] one\n[rank 2] two more\n[rank 2] \n[rank 2] three\n"
