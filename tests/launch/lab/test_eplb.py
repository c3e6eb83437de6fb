"""`serried eplb`: a recording in, balance and moves of every policy out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from eplb import Recording, RoutingRecorder, balancedness
from launch.cli import main
from moe import spread

LAYERS, EXPERTS, TOP_K = 3, 24, 2


def write(
    path: Path, *, seed: int = 0, tokens: int = 40, num_ranks: int = 4, model: str = "", skew: float = 1.0
) -> Path:
    """A recording of 5 steps with log-normal popularity of experts; the popularity is the same for every seed."""
    taste = skew * torch.randn(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(99))
    noise = torch.Generator().manual_seed(seed)
    recorder = RoutingRecorder(
        path, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, num_ranks=num_ranks, model=model
    )
    for _ in range(5):
        draws = torch.rand(LAYERS, tokens, EXPERTS, generator=noise).log().neg().log().neg() + taste[:, None]
        experts = draws.topk(TOP_K).indices
        counts = torch.stack([layer.flatten().bincount(minlength=EXPERTS) for layer in experts])
        recorder.add(counts, num_tokens=tokens)
    recorder.close()
    return path


@pytest.fixture
def reported(capsys):
    """reported(words) -> the lines on standard output; the exit code was 0."""

    def run(*words: str | Path) -> list[str]:
        assert main(["eplb", *map(str, words)]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.splitlines()

    return run


@pytest.fixture
def refused(capsys):
    """refused(words) -> the one line on standard error; the exit code was 2."""

    def run(*words: str | Path) -> str:
        assert main(["eplb", *map(str, words)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err.strip()

    return run


def test_the_report_says_what_each_policy_would_gain(tmp_path, reported):
    lines = reported(write(tmp_path / "r"), "--num-redundant-experts", "8", "--json")
    answer = json.loads(lines[-1])
    assert (answer["ranks"], answer["tokens_per_rank"]) == (4, 40)
    places = answer["placements"]
    assert list(places) == ["start", "serried", "deepseek"]
    assert places["start"]["balance"] < places["deepseek"]["balance"] <= places["serried"]["balance"] + 0.01
    assert places["start"]["moves"] == 0 < places["serried"]["moves"] < places["deepseek"]["moves"]
    assert all(len(place["balance_layers"]) == LAYERS for place in places.values())
    assert places["serried"]["bytes"] is None
    assert lines[0] == "200 tokens of 5 steps, 3 MoE layers of 24 experts, top 2"
    assert lines[1] == "planned for 4 ranks, 40.0 tokens of each in a step"
    assert "note: no model is named: give --model for bytes and step times" in lines


def test_balance_of_steps_is_that_of_the_recorded_steps(tmp_path, reported):
    recording = Recording.read(write(tmp_path / "r"))
    place = json.loads(reported(tmp_path / "r", "--json")[-1])["placements"]["start"]
    slots = spread(EXPERTS, 4).slot_experts
    inverse = [
        1 / balancedness(counts.tolist(), slots, 4) for step in recording.counts_NYE for counts in step
    ]  # every step and layer has the same mean
    assert place["balance_steps"] == pytest.approx(len(inverse) / sum(inverse), abs=1e-4)


def test_without_noise_the_balance_is_that_of_the_sums(tmp_path, reported):
    recording = Recording.read(write(tmp_path / "r"))
    place = json.loads(reported(tmp_path / "r", "--tokens-per-rank", "0", "--json")[-1])["placements"]["start"]
    expected = [balancedness(layer.tolist(), spread(EXPERTS, 4).slot_experts, 4) for layer in recording.loads_YE]
    assert place["balance_layers"] == pytest.approx(expected, abs=1e-4)


def test_a_file_that_is_named_twice_is_refused(tmp_path, refused):
    files = [write(tmp_path / f"r.{rank}", seed=rank, num_ranks=2) for rank in range(2)]
    for words in ([files[0], files[0]], [tmp_path / "r", files[1]], [tmp_path / "r", tmp_path / "r"]):
        assert re.search(r"report names .*r\.[01] twice; name each rank's file once", refused(*words))


def test_the_files_of_several_ranks_are_added_up(tmp_path, reported):
    files = [write(tmp_path / f"r{rank}", seed=rank, tokens=10 * rank) for rank in range(1, 4)]
    lines = reported(*files, "--ranks", "2")
    assert lines[0].startswith("300 tokens of 5 steps")
    assert lines[1] == "planned for 2 ranks, 20.0 tokens of each in a step"
    for rank in range(3):
        write(tmp_path / f"named.{rank}", seed=rank, tokens=10 * (rank + 1), num_ranks=3)
    assert reported(tmp_path / "named")[1] == "planned for 3 ranks, 20.0 tokens of each in a step"


def test_the_heat_map_has_a_line_a_layer_and_a_glyph_an_expert(tmp_path, reported):
    lines = reported(write(tmp_path / "r", skew=2.0))
    drawn = [line for line in lines if re.fullmatch(r" {4}\d [ .:\-=+*#%@]{1,24}", line)]
    assert [line[:6] for line in drawn] == ["    0 ", "    1 ", "    2 "]
    loads = Recording.read(tmp_path / "r").loads_YE
    for layer, line in enumerate(drawn):
        heat = loads[layer] / loads[layer].mean()
        hottest = line[6 + int(heat.argmax())]
        assert hottest == max(line[6:], key=" .:-=+*#%@".index)
        assert {line[6 + place] for place in range(EXPERTS) if heat[place] <= 0.5 and 6 + place < len(line)} <= {" "}


def test_bytes_and_step_times_come_with_the_model(tmp_path, reported):
    config = json.loads((Path("profiles/models/deepseek-v2-lite.json")).read_text("utf-8"))
    config |= {"num_hidden_layers": 4, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    lines = reported(write(tmp_path / "r", model=str(tmp_path / "config.json")), "--json")
    places = json.loads(lines[-1])["placements"]
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2
    assert places["serried"]["bytes"] == expert * places["serried"]["moves"] > 0
    assert 0 < places["serried"]["step_ms"] <= places["start"]["step_ms"]
    assert any(line.startswith("note: step times: peaks of 4 x NVIDIA H200 SXM, 40 tokens a rank") for line in lines)


def test_the_measured_tables_serve_the_model_they_were_measured_with(tmp_path, reported):
    recorder = RoutingRecorder(tmp_path / "r", num_layers=58, num_experts=256, top_k=8, num_ranks=32)
    counts = torch.full((58, 256), 4)
    counts[:, 0] += 124
    counts[:, 1:125] -= 1
    recorder.add(counts, num_tokens=128)
    recorder.close()
    lines = reported(tmp_path / "r", "--model", "deepseek-v3", "--num-redundant-experts", "32", "--json")
    assert any(line.startswith("note: step times: tables of DeepSeek-V3, 32 x NVIDIA H200") for line in lines)
    places = json.loads(lines[-1])["placements"]
    assert places["serried"]["step_ms"] < places["start"]["step_ms"]


def test_a_policy_that_does_not_fit_is_left_out_in_words(tmp_path, reported):
    lines = reported(write(tmp_path / "r"), "--num-redundant-experts", "3", "--json")
    assert list(json.loads(lines[-1])["placements"]) == ["start", "serried"]
    assert any("policy deepseek is left out: num_redundant_experts 3 does not fit" in line for line in lines)


def test_a_png_is_written_where_matplotlib_is_there(tmp_path, reported):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    reported(write(tmp_path / "r"), "--png", tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_png_without_matplotlib_is_refused_with_what_to_install(tmp_path, refused, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    line = refused(write(tmp_path / "r"), "--png", tmp_path / "heat.png")
    assert "png needs matplotlib, which is not installed" in line
    assert "pip install 'serried[report]'" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none",), "neither none nor none.0 is there"),
        (("text",), "text cannot be read as a recording"),
        (("empty",), "empty holds no tokens; record a run that decodes some"),
        (("r", "other"), "the recordings are not of the same steps of one model"),
        (("r", "--ranks", "25"), "num_ranks 25 must be from 1 to 24"),
        (("r", "--ranks", "0"), "ranks is 0; it must be at least 1, e.g. 1"),
        (("r", "--num-redundant-experts", "73"), "num_redundant_experts 73 must be from 0 to 72"),
        (("r", "--model", "deepseek-v3"), "model has 58 MoE layers of 256 experts, top 8; the recording has 3 of 24"),
        (("r", "--model", "deepseek-v9"), "'deepseek-v9' is not a folder or file"),
        (("r", "--gpu", "h9000", "--model", "config.json"), "'h9000' is not a device"),
    ],
)  # fmt: skip
def test_what_cannot_be_reported_is_refused_in_one_line(tmp_path, refused, monkeypatch, words, message):
    config = json.loads((Path("profiles/models/deepseek-v2-lite.json")).read_text("utf-8"))
    config |= {"num_hidden_layers": 4, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(config), "utf-8")
    write(Path("r"))
    write(Path("other"), num_ranks=2)
    write(Path("empty"), tokens=0)
    Path("text").write_text("no recording", "utf-8")
    assert message in refused(*words)
