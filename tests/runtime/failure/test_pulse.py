"""Pulses around real processes: whoever fails is found, named by all, and nobody is left behind; and nobody is killed
who only looks dead.

The ranks are small programs (see groups.py) that vote over the control plane. All groups are started in the beginning,
a little apart, and run side by side.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from runtime.failure.diagnosis import diagnose
from runtime.failure.flight import read_flight
from runtime.failure.judge import Limits
from tests.runtime.groups import Group


def deed(rank: int, phase: str, what: str) -> dict:
    return {"ranks": {str(rank): {"at": [30, phase], "deed": what}}}


SCENARIOS: dict[str, tuple[dict, dict]] = {
    "slow first step": ({"steps": 10} | {"ranks": {"2": {"at": [0, "LAUNCH"], "deed": "sleep 12"}}}, {}),
    "looks dead": (
        {
            "steps": 60,
            "ranks": {
                "1": {"at": [5, "LAUNCH"], "deed": "hold-gil 5"},
                "2": {"at": [5, "READ"], "deed": "stall 5"},
                "3": {"at": [3, "BETWEEN"], "deed": "throttle 8"},
            },
        },
        {},
    ),
    "stopped hub pulse": (deed(0, "DISPATCH", "signal-pulse SIGSTOP"), {}),
    "stopped pulse": (deed(3, "DISPATCH", "signal-pulse SIGSTOP"), {}),
    "stop 3 in dispatch": (deed(3, "DISPATCH", "signal SIGSTOP"), {}),
    "stop 0 in vote": (deed(0, "VOTE", "signal SIGSTOP"), {}),
    "hang": (deed(2, "COMBINE", "hang"), {"stuck_s": 2}),
    "hang behind the lock": (deed(1, "DISPATCH", "hold-gil 1000"), {"stuck_s": 2}),
    "second hand": (deed(1, "DISPATCH", "second-hand 2"), {}),
    "leaves": (deed(1, "BETWEEN", "leave"), {}),
    "raise 3 in dispatch": (deed(3, "DISPATCH", "raise"), {}),
    "raise 0 between": (deed(0, "BETWEEN", "raise"), {}),
    "kill 0 in combine": (deed(0, "COMBINE", "signal SIGKILL"), {}),
    "kill 3 in vote": (deed(3, "VOTE", "signal SIGKILL"), {}),
    "exit": (deed(2, "SAMPLE", "exit 7"), {}),
    "killed pulse": (deed(2, "DISPATCH", "signal-pulse SIGKILL"), {}),
    "early": ({"ranks": {"3": {"early": "raise"}}}, {}),
    "healthy": ({"steps": 20}, {}),
}
"""Name -> scenario and limits, the slowest first."""


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Waits for the group of a name: groups(name) -> (Group that has ended, its folder of flight records)."""
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in SCENARIOS}
    started: dict[str, Group] = {}
    arrived = threading.Condition()

    def start_all() -> None:
        for name, (scenario, limits) in SCENARIOS.items():
            group = Group.start(folders[name], scenario, **limits)
            with arrived:
                started[name] = group
                arrived.notify_all()
            time.sleep(0.3)

    starter = threading.Thread(target=start_all)
    starter.start()

    def wait_for(name: str) -> tuple[Group, Path]:
        with arrived:
            assert arrived.wait_for(lambda: name in started, 60)
        started[name].join(80)
        return started[name], folders[name]

    yield wait_for
    starter.join()
    for group in started.values():
        group.kill()


def check_end(group: Group, *, culprit: int, words: str, within_s: float = 5.0) -> None:
    """Everybody who could speak named the culprit in one line, all ended in time, no pulse is left.

    within_s   on a machine that is free; up to twice as long where the steps before took longer, too
    """
    said = group.words()
    for rank, lines in said.items():
        dead = group.codes[rank] not in (0, 1) and rank == culprit and not lines
        assert dead or len(lines) == 1, (rank, group.codes, group.errors[rank])
        assert dead or lines[0].startswith(f"serried: rank {culprit} failed"), lines
        assert dead or words in lines[0], lines
        assert dead or f"[rank {rank} ends; flight record " in lines[0], lines
    assert all(code != 0 for code in group.codes), group.codes
    assert group.seconds < within_s * group.slowness
    check_nobody_left(group)


def check_nobody_left(group: Group) -> None:
    for rank in range(len(group.processes)):
        [pid] = group.heard(rank, "pulse")
        status = Path(f"/proc/{int(pid)}/stat")
        until = time.monotonic() + 5.0  # a pulse says its last word before it ends
        while not _is_gone(status):
            assert time.monotonic() < until, f"the pulse of rank {rank} is still there"
            time.sleep(0.02)


def _is_gone(status: Path) -> bool:
    try:
        return status.read_text().rpartition(")")[2].split()[0] in "ZX"  # not reaped: still gone
    except OSError:
        return True


def test_a_healthy_group_ends_in_order(groups):
    group, folder = groups("healthy")
    assert group.codes == [0, 0, 0, 0]
    assert group.errors == [[], [], [], []]
    assert list(folder.iterdir()) == []
    check_nobody_left(group)


@pytest.mark.parametrize(
    ("name", "culprit", "place", "cause"),
    [
        ("raise 3 in dispatch", 3, "in step 30, dispatch of layer 2", "raised ValueError: boom in two lines"),
        ("raise 0 between", 0, "in step 30, between", "raised ValueError: boom in two lines"),
        ("kill 0 in combine", 0, "in step 30, combine of layer 2", "its process was killed by SIGKILL"),
        ("kill 3 in vote", 3, "in step 30, vote", "its process was killed by SIGKILL"),
        ("exit", 2, "in step 30, sample", "its process has ended with code 7 and without a word"),
        ("early", 3, "before its first step", "raised ValueError: boom in two lines"),
    ],
)
def test_a_rank_that_raises_or_dies_is_named_by_all_at_once(groups, name, culprit, place, cause):
    group, folder = groups(name)
    check_end(group, culprit=culprit, words=f"{place}: {cause}", within_s=3.0)
    found = diagnose(sorted(folder.glob("flight-*.json")))
    assert (found.first, found.agreed, found.missing) == (culprit, True, ())
    assert found.lines[0] == f"rank {culprit} stopped first, {place}"


@pytest.mark.parametrize(
    ("name", "culprit", "place"),
    [("stop 3 in dispatch", 3, "in step 30, dispatch of layer 2"), ("stop 0 in vote", 0, "in step 30, vote")],
)
def test_a_stopped_rank_is_named_and_killed(groups, name, culprit, place):
    group, folder = groups(name)
    check_end(group, culprit=culprit, words=f"{place}: its process is stopped, for 1.")
    assert group.codes[culprit] == -9
    assert read_flight(folder / f"flight-rank{culprit}.json").written_by == "pulse"


def test_a_rank_without_progress_is_named_and_not_those_that_wait_for_it(groups):
    group, _ = groups("hang")
    words = "in step 30, combine of layer 2: makes no progress for 2."
    check_end(group, culprit=2, words=words)
    assert "ranks 0, 1 and 3 wait for it, in step 31, vote" in group.words()[0][0]


def test_a_rank_that_hangs_with_the_lock_of_its_interpreter_is_ended_by_its_pulse(groups):
    group, folder = groups("hang behind the lock")
    check_end(group, culprit=1, words="in step 30, dispatch of layer 2: makes no progress for 2.")
    assert group.codes[1] == -9
    assert read_flight(folder / "flight-rank1.json").written_by == "pulse"
    assert len(group.words()[1]) == 1


def test_an_error_that_another_rank_has_caused_names_that_one(groups):
    group, _ = groups("second hand")
    check_end(group, culprit=2, words="rank 1 raised PeerFailed: rank 2 closed its link")
    assert group.seconds > Limits().second_hand_s


def test_a_rank_that_leaves_the_others_behind_is_named(groups):
    group, _ = groups("leaves")
    assert group.codes == [1, 0, 1, 1]
    for rank in (0, 2, 3):
        [line] = group.words()[rank]
        assert line.startswith("serried: rank 1 failed in step 30, between: ")
    check_nobody_left(group)


def test_a_pulse_that_dies_takes_its_rank_along(groups):
    group, _ = groups("killed pulse")
    check_end(group, culprit=2, words="its pulse is gone", within_s=3.0)


def test_a_silent_pulse_is_named_after_two_seconds(groups):
    group, _ = groups("stopped pulse")
    check_end(group, culprit=3, words="", within_s=6.0)
    assert "nothing was heard of its pulse for 2." in group.words()[0][0]
    assert "its pulse does not answer" in group.words()[3][0]


def test_a_silent_hub_is_named_by_every_pulse(groups):
    group, _ = groups("stopped hub pulse")
    check_end(group, culprit=0, words="", within_s=6.0)
    for rank in (1, 2, 3):
        assert "nothing was heard of its pulse, the hub, for 2." in group.words()[rank][0]


@pytest.mark.slow
def test_who_only_looks_dead_is_left_alone(groups, tmp_path):
    """For 5 s one rank holds its interpreter's lock and one waits for a file; one gets 5% of a core all the time.

    Where who stops it gets no core for long, the rank is stopped in earnest, and it has to be done again.
    """
    group, _ = groups("looks dead")
    stopped = [group.heard(3, "stopped")]
    while not stopped[-1] or stopped[-1][0] >= 1.0:
        assert len(stopped) < 4, f"the test itself stopped the rank for so many seconds: {stopped}; {group.errors}"
        folder = tmp_path / str(len(stopped))
        folder.mkdir()
        group = Group.start(folder, SCENARIOS["looks dead"][0])
        try:
            group.join(40)
        finally:
            group.kill()
        stopped.append(group.heard(3, "stopped"))
    assert group.codes == [0, 0, 0, 0], group.errors
    assert group.errors == [[], [], [], []]


@pytest.mark.slow
def test_a_first_step_longer_than_any_other_may_be_is_waited_for(groups):
    group, _ = groups("slow first step")
    assert group.codes == [0, 0, 0, 0], group.errors
    [began] = group.heard(2, "act")
    assert group.heard(0, "done")[0] - began > 12 > Limits().stuck_s
