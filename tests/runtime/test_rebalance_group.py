"""Experts move between processes: over gloo and MPI, and with a rank that ends in the middle of it."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.test_groups import MPIRUN, ROOT, assert_same, finish, mpirun, start
from tests.runtime.mixes import SMALL_V3

PROGRAM = [sys.executable, str(ROOT / "tests" / "runtime" / "programs" / "rebalancing.py")]
MOVING = ["--enable-eplb", "--eplb-window", "1", "--eplb-interval", "1", "--eplb-min-gain", "0"]
LIMITED = [*MOVING, "--num-redundant-experts", "8", "--eplb-bytes-per-step", "60000"]


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words that decode twelve requests of a small random model in float64."""
    folder = tmp_path_factory.mktemp("rebalance")
    (folder / "config.json").write_text(json.dumps(SMALL_V3))
    lines = [
        {
            "prompt_token_ids": [(7 * index + place) % 160 for place in range(1 + 11 * (index % 5))],
            "max_tokens": 14,
            "temperature": 0.8 * (index % 2),
            "seed": index,
            "logprobs": 2,
        }
        for index in range(12)
    ]
    (folder / "mix.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["generate", str(folder), "--load-format", "dummy", "--dtype", "float64", "--json"]
    words += ["--prompts", str(folder / "mix.jsonl"), "--num-blocks", "100", "--block-size", "16"]
    return [*words, "--max-num-seqs", "3"]


def answers(command: list[str]) -> tuple[list[dict[str, Any]], str]:
    process = start(command)
    out, err = finish(process)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()], err


@pytest.fixture(scope="module")
def truth(mix: list[str]) -> list[dict[str, Any]]:
    """One rank, nothing moves."""
    return answers([sys.executable, "-m", "launch", *mix])[0]


@pytest.mark.parametrize(("transport", "size"), [("gloo", 4), ("mpi", 2)])
def test_no_transport_lets_a_moving_expert_change_an_answer(mix, truth, transport: str, size: int):
    if transport == "mpi" and MPIRUN is None:
        pytest.skip("mpirun is not installed: pip install 'serried[mpi]'")
    planted = [*PROGRAM, "none", "0", "--", *mix, *LIMITED, "--transport", transport]
    found, err = answers([*mpirun(size), *planted] if transport == "mpi" else [*planted, "--ranks", str(size)])
    assert_same(found, truth)
    assert err.count("experts rebalanced in") >= 2, err


def test_a_rank_killed_in_a_migration_is_named_by_all_others_and_the_next_start_is_clean(mix, truth, tmp_path: Path):
    planted = [*PROGRAM, "kill", "2", "--", *mix, *LIMITED, "--transport", "gloo", "--ranks", "3"]
    process = start([*planted, "--flight-dir", str(tmp_path)])
    time.sleep(0.5)
    began, family = time.monotonic(), []
    while process.poll() is None and time.monotonic() - began < 60.0:
        family = psutil.Process(process.pid).children(recursive=True) or family
        time.sleep(0.05)
    _, err = finish(process, limit_s=60.0)
    assert process.returncode not in (0, None)
    reports = [line for line in err.splitlines() if re.search(r"rank 2 failed in step \d+", line)]
    speakers = {int(number) for line in reports for number in re.findall(r"\[rank (\d) ends", line)}
    assert speakers >= {0, 1}, err
    assert any("migrat" in line for line in reports), reports
    psutil.wait_procs(family, timeout=15.0)
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    found, err = answers([*PROGRAM, "none", "0", "--", *mix, *LIMITED, "--ranks", "2"])
    assert_same(found, truth)
    assert "experts rebalanced in" in err
