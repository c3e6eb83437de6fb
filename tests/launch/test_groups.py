"""`serried generate` as a group of processes: every way to start it, every transport, and what a failing rank does."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.cli import main
from runtime.failure.flight import read_flight
from tests.runtime.mixes import SMALL_V3

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "launch"]
FAULTY = [sys.executable, str(ROOT / "tests" / "launch" / "programs" / "faulty.py")]
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
LIMIT_S = 100.0


def mpirun(size: int) -> list[str]:
    words = [str(MPIRUN), "--oversubscribe", "--enable-recovery", "-n", str(size)]
    return words[:1] + (["--allow-run-as-root"] if os.geteuid() == 0 else []) + words[1:]


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[str, str]:
    """What it says until it ends; whatever it started is ended with it."""
    try:
        return process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still running after {limit_s} s; it said:\n{out}\n{err}")


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model without weights, and 40 requests: random lengths, greedy and seeded."""
    folder = tmp_path_factory.mktemp("groups")
    (folder / "config.json").write_text(json.dumps(SMALL_V3))
    rng = random.Random(7)
    lines = [
        {
            "prompt_token_ids": [rng.randrange(160) for _ in range(rng.choice([1, 3, 17, 64, 90]))],
            "max_tokens": rng.choice([1, 5, 12]),
            "temperature": rng.choice([0.0, 0.9]),
            "seed": index,
            "logprobs": 2,
        }
        for index in range(40)
    ]
    prompts = folder / "mix.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return folder, prompts


def words_for(mix: tuple[Path, Path], *, interval: str) -> list[str]:
    folder, prompts = mix
    words = [
        "generate",
        str(folder),
        "--load-format",
        "dummy",
        "--dtype",
        "float64",
        "--prompts",
        str(prompts),
        "--json",
    ]
    words += ["--num-blocks", "200", "--block-size", "16", "--max-num-seqs", "4", "--max-num-batched-tokens", "100"]
    return [*words, "--prefill-schedule-interval", interval]


def answers(command: list[str]) -> list[dict[str, Any]]:
    process = start(command)
    out, err = finish(process)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def truth(mix: tuple[Path, Path]) -> list[dict[str, Any]]:
    """One rank, off the cadence."""
    return answers([*PROGRAM, *words_for(mix, interval="1")])


def assert_same(found: list[dict[str, Any]], truth: list[dict[str, Any]]) -> None:
    assert [answer["token_ids"] for answer in found] == [answer["token_ids"] for answer in truth]
    assert [answer["finish_reason"] for answer in found] == [answer["finish_reason"] for answer in truth]
    for mine, theirs in zip(found, truth, strict=True):
        for entry, expected in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            assert abs(entry["logprob"] - expected["logprob"]) <= 1e-10


THREADS, GLOO, MPI = ["--transport", "threads", "--ranks"], ["--transport", "gloo", "--ranks"], ["--transport", "mpi"]
IN_SHORT = [
    ("threads", 4, "auto", 1),
    ("gloo", 4, "auto", 1),
    ("mpi", 4, "auto", 2),
]
IN_FULL = [
    (transport, size, interval)
    for transport, sizes in (("threads", (1, 4)), ("gloo", (2, 4)), ("mpi", (2, 4)))
    for size in sizes
    for interval in ("1", "4", "auto")
]


def group_command(mix: tuple[Path, Path], transport: str, size: int, interval: str) -> list[str]:
    words = words_for(mix, interval=interval)
    if transport == "mpi":
        return [*mpirun(size), *PROGRAM, *words, *MPI]
    return [*PROGRAM, *words, *(THREADS if transport == "threads" else GLOO), str(size)]


def in_tracks(tracks: int) -> list[str]:
    """The words that cut every step into so many."""
    words = ["--dbo", "on" if tracks > 1 else "off", "--dbo-tracks", str(max(tracks, 2))]
    return [*words, "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "1"]


@pytest.mark.parametrize(("transport", "size", "interval", "tracks"), IN_SHORT)
def test_no_transport_no_interval_and_no_tracks_change_an_answer(
    mix, truth, transport: str, size: int, interval: str, tracks: int
):
    if transport == "mpi" and MPIRUN is None:
        pytest.skip("mpirun is not installed: pip install 'serried[mpi]'")
    assert_same(answers([*group_command(mix, transport, size, interval), *in_tracks(tracks)]), truth)


@pytest.mark.soak
@pytest.mark.parametrize(("transport", "size", "interval"), IN_FULL)
def test_no_pair_of_transport_and_interval_changes_an_answer(mix, truth, transport: str, size: int, interval: str):
    assert_same(answers(group_command(mix, transport, size, interval)), truth)


def test_torchrun_starts_a_group_and_three_tracks_change_no_answer(mix, truth):
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "launch", *words_for(mix, interval="4")]
    assert_same(answers([*command, *in_tracks(3)]), truth)


def test_when_torchrun_is_killed_its_ranks_end_too():
    words = ["generate", "profiles/models/tiny-v3", "--num-blocks", "64", "--prompt", "x", "--ignore-eos"]
    process = start([TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "launch", *words, "--max-tokens", "1900"])
    assert process.stdout is not None
    if not process.stdout.readline().startswith("==="):
        pytest.fail(f"it did not start: {finish(process)}")
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, left = psutil.wait_procs(family, timeout=30.0)
    for child in left:
        child.kill()
    process.communicate()
    assert not left


SHORT_FAULTS = [("gloo", "kill", "combine", 3), ("gloo", "stop", "dispatch", 0), ("mpi", "raise", "vote", 3)]
ALL_FAULTS = [
    (transport, kind, where, rank)
    for transport in ("gloo", "mpi")
    for kind in ("raise", "kill", "stop")
    for where in ("dispatch", "combine", "vote", "between")
    for rank in (0, 3)
]


def check_fault(tmp_path: Path, transport: str, kind: str, where: str, rank: int) -> None:
    """Every survivor names the culprit within 5 s, all end, and nothing is left."""
    words = ["generate", "profiles/models/tiny-v3", "--num-blocks", "64", "--prompt", "x", "--ignore-eos"]
    words += ["--flight-dir", str(tmp_path), "--transport", transport]
    planted = [*FAULTY, kind, where, str(rank), "6", "--", *words, "--max-tokens", "1900"]
    process = start([*mpirun(4), *planted] if transport == "mpi" else [*planted, "--ranks", "4"])
    assert process.stdout is not None
    if not process.stdout.readline().startswith("==="):  # decoding has begun; step 6 is a moment away
        pytest.fail(f"it did not start: {finish(process)}")
    family = psutil.Process(process.pid).children(recursive=True)
    _, err = finish(process, limit_s=60.0)
    assert process.returncode != 0
    reports = [line for line in err.splitlines() if re.search(rf"rank {rank} failed in step 6", line)]
    speakers = {int(number) for line in reports for number in re.findall(r"\[rank (\d) ends", line)}
    survivors = set(range(4)) - {rank}
    assert survivors <= speakers, err
    assert not [line for line in err.splitlines() if re.search(r"rank \d failed", line) and line not in reports], err
    psutil.wait_procs(family, timeout=15.0)
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    for survivor in survivors:
        record = read_flight(tmp_path / f"flight-rank{survivor}.json")
        assert record.last is not None
        assert record.monotonic_ns - record.last.ns < 5e9, "from its last move to its record"


@pytest.mark.parametrize(("transport", "kind", "where", "rank"), SHORT_FAULTS)
def test_a_failing_rank_is_named_by_all_survivors(tmp_path, transport: str, kind: str, where: str, rank: int):
    if transport == "mpi" and MPIRUN is None:
        pytest.skip("mpirun is not installed: pip install 'serried[mpi]'")
    check_fault(tmp_path, transport, kind, where, rank)


@pytest.mark.soak
@pytest.mark.parametrize(("transport", "kind", "where", "rank"), ALL_FAULTS)
def test_every_fault_is_named(tmp_path, transport: str, kind: str, where: str, rank: int):
    check_fault(tmp_path, transport, kind, where, rank)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--transport", "mpi", "--ranks", "2"], "transport is mpi, but what started this is: own launcher"),
        (
            ["--transport", "nccl", "--ranks", "2"],
            "transport is nccl, but device is cpu; rows there travel over gloo or",
        ),
    ],
)
def test_a_transport_that_cannot_be_is_refused_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "profiles/models/tiny-v3", "--prompt", "x", *words]) == 2
    said = capsys.readouterr()
    assert (said.out, message in said.err.splitlines()[-1]) == ("", True)
