"""`serried top`: every rank of a group that runs, rates from look to look, and what somebody should look at."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.commands import REFUSED, run_command
from launch.groups.display import Display
from launch.observe.top import Looks, group_heat, strip
from runtime import Engine, EngineConfig, SamplingParams
from runtime.failure.verdict import Reason, Verdict
from runtime.loop.show_page import WORDS, PageState, ShowPage
from runtime.thread_ranks import ThreadRanks

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pages(tmp_path: Path) -> list[ShowPage]:
    display = Display("run", chosen=tmp_path / "base")
    for rank in range(2):
        display.show(rank, 4)
    now_ns = time.monotonic_ns()
    for rank, page in enumerate(display._pages):
        page.write({
            "state": PageState.STEPS, "beat_ns": now_ns - 10**9, "step": 9, "steps": 10, "running": 3 + rank,
            "waiting": 2 * rank, "pages": 100, "free_pages": 60, "generated_tokens": 50, "step_us": 12_000,
            "own_us": 9000, "exchange_us": 2000, "beat_us": 1000, "mean_pairs": 10, "most_pairs": 20, "cut_steps": 5,
            "prefill_interval": 4,
        })  # fmt: skip
    return display._pages


def test_every_rank_has_its_line_and_rates_are_from_one_look_to_the_next(tmp_path: Path, pages: list[ShowPage]):
    looks = Looks(tmp_path / "base")
    begin_ns = time.monotonic_ns() - 10**9
    pages[0].write({"beat_ns": begin_ns})
    [group] = looks.look()
    assert [rank["tokens_per_s"] for rank in group["ranks"]] == [None, None]
    assert group["expert_balance"] == 0.5
    pages[0].write(
        {"beat_ns": begin_ns + 2 * 10**9, "generated_tokens": 90, "mean_pairs": 19, "most_pairs": 30, "steps": 11}
    )
    [group] = looks.look()
    first, second = group["ranks"]
    assert first["tokens_per_s"] == pytest.approx(20.0)
    assert (second["tokens_per_s"], second["waiting"], second["cache_used"]) == (0.0, 2, pytest.approx(0.4))
    assert group["expert_balance"] == pytest.approx(0.9), "of the steps since"
    assert (group["ranks_of_group"], group["warnings"], group["failed"]) == (4, [], None)


def test_once_prints_every_rank_and_json_has_the_same(
    tmp_path: Path, pages: list[ShowPage], capsys: pytest.CaptureFixture[str]
):
    pages[0].write_heat([4, 2, 0])
    pages[1].write_heat([4, 2, 8])
    words = ["--once", "--run-dir", str(tmp_path / "base")]
    assert run_command("top", words) == 0
    said = capsys.readouterr().out
    assert "2 ranks here, 2 elsewhere, step 9" in said
    for line in ("    0  steps", "    1  steps", "prompts every 4", "in several tracks 50%", "load      "):
        assert line in said
    assert run_command("top", [*words, "--json"]) == 0
    [group] = json.loads(capsys.readouterr().out)["groups"]
    assert [rank["running"] for rank in group["ranks"]] == [3, 4]
    assert group["heat"] == [1.0, 0.5, 0.6667]


def test_late_full_and_degraded_ranks_are_warned_of(tmp_path: Path, pages: list[ShowPage]):
    pages[0].write({"beat_ns": time.monotonic_ns() - 9 * 10**9})
    pages[1].write({"waiting": 4, "free_pages": 1, "degraded": 1})
    [group] = Looks(tmp_path / "base").look()
    assert [rank["state"] for rank in group["ranks"]] == ["late", "steps"]
    assert group["warnings"] == [
        "rank 0 is late",
        "rank 1 is slow for long and gets no new requests",
        "requests wait for cache on rank 1",
    ]
    pages[0].write({"state": PageState.IDLE})
    assert Looks(tmp_path / "base").look()[0]["ranks"][0]["state"] == "idle", "nothing is expected of it"


@pytest.mark.timeout(120)
def test_a_rank_whose_process_is_stopped_or_gone_shows_as_such_before_the_group_knows(
    tmp_path: Path, pages: list[ShowPage]
):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        started = int(Path(f"/proc/{child.pid}/stat").read_text("ascii").rpartition(")")[2].split()[19])
        pages[1].write({"pid": child.pid, "started": started})
        looks = Looks(tmp_path / "base")
        assert [rank["state"] for rank in looks.look()[0]["ranks"]] == ["steps", "steps"]
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 10
        while looks.look()[0]["ranks"][1]["state"] != "stopped":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert looks.look()[0]["warnings"] == ["rank 1 is stopped"]
        os.kill(child.pid, signal.SIGCONT)
    finally:
        child.communicate()
    [group] = looks.look()
    assert [rank["state"] for rank in group["ranks"]] == ["steps", "gone"]
    assert group["failed"] is None


def test_a_failed_group_is_named_with_the_rank_that_failed(
    tmp_path: Path, pages: list[ShowPage], capsys: pytest.CaptureFixture[str]
):
    for page in pages:
        page.write_verdict(Verdict(culprit=1, reason=Reason.STOPPED, cause="its process is stopped"))
    assert run_command("top", ["--once", "--run-dir", str(tmp_path / "base")]) == 1, "nothing runs"
    said = capsys.readouterr().out
    assert "run run has failed: rank 1 failed: its process is stopped" in said
    assert "    1  STOPPED" in said
    assert "    0  ended" in said


def test_where_no_group_runs_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_command("top", ["--once", "--run-dir", str(tmp_path)]) == 1
    assert "no group of this user runs here" in capsys.readouterr().out


def test_a_folder_of_somebody_elses_and_a_strange_interval_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tmp_path.chmod(0o777)
    assert run_command("top", ["--once", "--run-dir", str(tmp_path)]) == REFUSED
    assert "is not a folder of this user's own" in capsys.readouterr().err
    assert run_command("top", ["--interval", "0"]) == REFUSED
    assert "interval is 0.0; it must be from 0.05 to 3600" in capsys.readouterr().err


def test_the_strip_rises_with_the_load():
    assert strip([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(strip([0.5] * 128)) == 64
    assert group_heat([]) == []


@pytest.mark.timeout(120)
def test_ranks_that_are_threads_show_what_they_did(tmp_path: Path, tiny: str):
    display = Display("run", chosen=tmp_path / "base")
    config = EngineConfig(model=tiny, ranks=2)
    ranks = ThreadRanks(
        config, drafter=None, on_plan=None, on_progress=None, show=lambda rank: display.show(rank, config.ranks)
    )
    with Engine(config, ranks=ranks) as engine:
        engine.generate([[1, 2, 3]] * 4, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        [group] = Looks(tmp_path / "base").look()
        stats = engine.stats().ranks
    assert [rank["state"] for rank in group["ranks"]] == ["idle", "idle"]
    for shown, truth in zip(group["ranks"], stats, strict=True):
        assert shown["generated_tokens"] == truth.generated_tokens == 24
        assert shown["computed_tokens"] == truth.computed_tokens
        assert shown["step_ms"] >= shown["own_ms"] > 0
    assert group["steps"] == stats[0].steps
    assert len(group["heat"]) == 32
    assert max(group["heat"]) == 1.0
    display.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stopped_rank_of_four_processes_shows_as_stopped_while_the_others_are_seen(tmp_path: Path, tiny: str):
    base = tmp_path / "base"
    words = ["bench", "throughput", tiny, "--ranks", "4", "--num-blocks", "64", "--num-prompts", "32"]
    words += ["--output-len", "400", "--run-dir", str(base)]
    group = subprocess.Popen(
        [sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        looks = Looks(base)
        seen = wait_for(looks, lambda ranks: [rank["state"] for rank in ranks] == ["steps"] * 4)
        assert [rank["rank"] for rank in seen] == [0, 1, 2, 3]
        assert all(rank["running"] > 0 for rank in seen)
        os.kill(seen[2]["pid"], signal.SIGSTOP)
        seen = wait_for(looks, lambda ranks: ranks[2]["state"] == "stopped")
        assert [rank["rank"] for rank in seen] == [0, 1, 2, 3]
        _, said = group.communicate(timeout=60)
        assert b"rank 2 failed" in said
        [failed] = looks.look()
        assert "rank 2 failed" in failed["failed"]
        assert [rank["state"] for rank in failed["ranks"]] == ["ended", "ended", "stopped", "ended"]
    finally:
        for process in (*psutil.Process(group.pid).children(recursive=True), group) if group.poll() is None else ():
            process.kill()
        group.communicate()


def wait_for(looks: Looks, met: Any) -> list[dict[str, Any]]:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        groups = looks.look()
        if groups and len(groups[0]["ranks"]) == 4 and met(groups[0]["ranks"]):
            return groups[0]["ranks"]
        time.sleep(0.05)
    raise AssertionError(f"not seen in time: {looks.look()}")


@pytest.mark.timeout(120)
def test_whatever_else_lies_in_the_folder_is_passed_over(
    tmp_path: Path, pages: list[ShowPage], capsys: pytest.CaptureFixture[str]
):
    base = tmp_path / "base"
    rubbish = base / "rubbish"
    rubbish.mkdir()
    (base / "rank0").write_text("a file among groups")
    os.mkfifo(rubbish / "rank0")
    (rubbish / "rank1").symlink_to("/dev/zero")
    (rubbish / "rank2").mkdir()
    dice = random.Random(5)
    whole = pages[0].path.read_bytes()
    for number in range(3, 60):  # pages with noise behind their first words, and noise altogether
        kept = dice.choice([0, 8, 24, 64, 8 * len(WORDS)])
        (rubbish / f"rank{number}").write_bytes(whole[:kept] + dice.randbytes(len(whole) - kept))
    assert run_command("top", ["--once", "--run-dir", str(base)]) == 0
    assert "run run: 2 ranks here" in capsys.readouterr().out
    assert run_command("top", ["--once", "--json", "--run-dir", str(base)]) == 0
    assert json.loads(capsys.readouterr().out)["groups"]
