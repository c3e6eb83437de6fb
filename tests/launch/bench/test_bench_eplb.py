"""`serried bench eplb` on the bundled trained model: what it measures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.commands import REFUSED, run_command

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "profiles" / "models" / "tiny-v3")
SMALL = ["--ranks", "4", "--transport", "threads", "--requests", "5", "--prompt-len", "8", "--tokens", "16"]


@pytest.mark.slow
def test_ranks_are_more_level_after_the_move_and_no_step_moves_more_than_it_may(capsys: pytest.CaptureFixture[str]):
    limit = 150_000
    words = ["--model", MODEL, *SMALL, "--skew", "1.2", "--eplb-bytes-per-step", str(limit)]
    assert run_command("bench", ["eplb", *words]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert (found["rebalances"], found["dropped"]) == (1, 0)
    assert "experts rebalanced in" in said.err
    assert found["level_after"] > found["level_before"] + 0.02, "measured in the same requests"
    assert all(after >= before for before, after in zip(found["expected_before"], found["expected_after"], strict=True))
    assert 0 < found["most_bytes_a_step"] <= limit
    assert found["beats"] >= found["bytes_moved"] / (4 * limit)
    assert found["beat_cpu_ms"] < 20 * found["bytes_cpu_ms"] + 20.0, "what the bytes cost, and a few calls"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "ranks is 0; it must be at least 1"),
        (["--skew", "-1"], "skew is -1.0; it must be from 0 to 10"),
        (["--ranks", "40", "--transport", "threads"], "num_ranks 40 must be from 1 to 32"),
        (
            ["--num-redundant-experts", "1000", "--transport", "threads"],
            "num_redundant_experts 1000 must be from 0 to 96",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command("bench", ["eplb", "--model", MODEL, *words]) == REFUSED
    assert message in capsys.readouterr().err
