"""`serried doctor` on a machine without a GPU: what it checks, what it says of the rest, and how it fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ep import PeerFailed
from launch.cli import main
from launch.groups.world import own_world
from launch.observe import first_contact
from launch.observe.first_contact import (
    CHECK_S,
    Speaker,
    deadline,
    decoded,
    not_checked_once,
    reference_tokens,
    until_one_fails,
)
from runtime.failure.checkup import Check, Finding, Outcome, Shared

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[3]


def test_asked_for_gpus_it_fails_with_what_to_try_and_meets_nobody(capsys, monkeypatch):
    monkeypatch.setattr(first_contact, "meet_ranks", None)
    assert main(["doctor", "--device", "cuda", "--ranks", "1"]) == 1
    out = capsys.readouterr().out
    assert "failed      driver: NVIDIA's driver does not answer" in out
    assert "            try         nvidia-smi on this node" in out


def test_the_engine_decodes_what_the_plain_function_does():
    torch.set_num_threads(1)
    assert reference_tokens() == decoded(torch.device("cpu"), "reference")


def finding(name: str, outcome: Outcome, words: str) -> Finding:
    return Finding(name=name, outcome=outcome, words=words, means="it is bad" if outcome is Outcome.FAILED else "")


def test_failures_name_their_ranks_and_what_was_not_checked_is_said_once(capsys):
    together = [
        Shared(finding=finding("clocks", Outcome.NOT_CHECKED, "no GPU"), ranks=(0, 1, 2)),
        Shared(finding=finding("wire", Outcome.FAILED, "bent"), ranks=(1, 2)),
        Shared(finding=finding("NCCL", Outcome.NOT_CHECKED, "no GPU"), ranks=(0, 1, 2)),
    ]
    assert [shared.finding.name for shared in not_checked_once(together)] == ["clocks; NCCL", "wire"]
    Speaker(own_world(0, 3)).findings(together)
    Speaker(own_world(1, 3)).findings(together)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "not checked clocks; NCCL: no GPU",
        "failed      wire (ranks 1 and 2): bent",
        "            that means  it is bad",
    ]
    assert len(lines) == 4


def test_after_a_failure_the_others_are_told_and_nothing_more_is_tried():
    def fail() -> str:
        raise PeerFailed(1, "is gone")

    tried, told = [], []
    checks = [
        Check(name=name, run=run, means="", tries="")
        for name, run in (("a", lambda: "fine"), ("b", fail), ("c", lambda: tried.append("c") or "fine"))
    ]
    findings = list(until_one_fails(iter(checks), told.append))
    assert [each.outcome for each in findings] == [Outcome.OK, Outcome.FAILED]
    assert len(told) == 1
    assert tried == []


def test_a_check_that_hangs_ends_the_process_with_its_name():
    program = (
        "import time; from launch.observe.first_contact import deadline; from runtime.failure.checkup import Check\n"
        "with deadline(Check(name='wire', run=str, means='it hangs', tries='pulling'), seconds=0.2): time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "stuck for 0.2 s in the check of wire" in done.stderr
    assert "it hangs" in done.stderr
    assert "pulling" in done.stderr


def test_a_check_that_ends_in_time_is_left_alone():
    before = set(threading.enumerate())
    with deadline(Check(name="wire", run=str, means="", tries=""), seconds=60.0):
        [timer] = set(threading.enumerate()) - before
    timer.join(10)
    assert not timer.is_alive(), "it no longer runs, and so ends nothing"
    assert CHECK_S < 120
