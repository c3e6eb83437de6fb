"""`serried bench overlap` says what was asked, where and what came out, draws a step, and ends in one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_two_ranks_measure_and_rank_0_tells(tmp_path: Path):
    trace = tmp_path / "overlap.json"
    words = ["bench", "overlap", "--ranks", "2", "--requests", "3", "--rounds", "2", "--clock", "core"]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words, "--trace", str(trace)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    assert (found["ranks"], found["tracks"], found["order"]) == (2, 2, "abreast")
    names = ("one track", "one track, slow link", "several tracks", "several tracks, slow link")
    for name in names:
        wall_ms, cpu_ms, exposed_ms = found[name]
        assert cpu_ms > 0
        assert 0 <= exposed_ms < wall_ms
    added_ms = found["one track, slow link"][2] - found["one track"][2]
    assert added_ms > 0.4 * found["one track"][1], "one track hides nothing of a link as slow as the compute is long"
    assert [line.split()[1] for line in lines if line.startswith("track ")] == ["0", "1"]
    assert any(line.startswith("hidden ") for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {"overlap.json", "overlap.rank1.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "ranks is 1; a rank alone exchanges nothing"),
        (["--share", "0"], "share is 0.0; it must be above 0"),
        (["--tracks", "1"], "tracks is 1; it must be at least 2"),
        (["--trace", "no/folder.json"], "trace is 'no/folder.json'; it must be a file in a folder that is there"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "overlap", *words]) == 2
    assert message in capsys.readouterr().err
