"""`serried bench rank-slice` says what was measured, what was modelled, and of what."""

from __future__ import annotations

import json

import pytest

from launch.commands import run_command

pytestmark = pytest.mark.timeout(120)

WORDS = ["rank-slice", "--model", "tiny-v3", "--ep", "4", "--batch", "4", "--context", "64", "--layers", "3"]


def test_it_measures_and_says_which_figures_are_modelled(capsys):
    assert run_command("bench", [*WORDS, "--device", "cpu", "--gpu", "cpu", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "measured on this device; wire: modelled" in out
    assert "Layers with experts: 3, of which 2 were built" in out
    last = json.loads(out.splitlines()[-1])
    assert last["step_us"] < last["step_with_stand_in_us"] + 2 * last["moe_layer_us"]
    assert last["measured_us"].keys() >= {"routed experts", "attention core", "head"}
    assert last["roofline_us"]["routed experts"] < last["measured_us"]["routed experts"]
    [group] = last["groups"]  # nobody published tables of this model
    assert group["what"] == "as built"
    assert group["tokens_per_s"] == pytest.approx(4e6 / group["in_turns_us"])


def test_without_a_gpu_it_says_what_would_do(capsys):
    assert run_command("bench", WORDS) == 2
    assert "give --device cpu" in capsys.readouterr().err


def test_a_recording_of_another_model_is_refused(capsys, tmp_path):
    assert run_command("bench", [*WORDS, "--device", "cpu", "--routing", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
