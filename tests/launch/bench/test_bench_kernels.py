"""`serried bench kernels`: what is printed, what is saved, and what is refused before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.bench import bench_kernels
from launch.bench.bench_kernels import DEVICE, rate_table
from launch.bench.gpu_kernels import ranks_of, tell
from launch.commands import REFUSED, run_command
from runtime.bench.kernel_bench import Rate, Sizes
from runtime.bench.kernel_times import CaseTime
from runtime.bench.rate_bench import RateSizes
from runtime.costs.rates import read_rates
from runtime.model.model_config import read_model_config
from runtime.weights.hardware import read_hardware

TINY = Sizes(products=(("small", 8, 32, 16),), memory_bytes=1 << 16, rows=(2,), row_bytes=64, sent=4, rounds=3)

TINY_RATES = RateSizes(
    tokens=(1, 4), product=(64, 32), num_products=2, rows=(1, 2), expert=(64, 32), num_experts=2, contexts=(64,),
    heads=2, requests=2, decode_tokens=(1, 2), depths=(2, 3), prompt_len=4, outputs=(2, 4), tries=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny_and_threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench_kernels, "Sizes", lambda: TINY)
    monkeypatch.setattr(bench_kernels, "RateSizes", lambda: TINY_RATES)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_last_line_is_json_and_the_profile_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "my cpu.toml"
    assert run_command("bench", ["kernels", "--save", str(path)]) == 0
    question, machine, commit, settings, *_, last = capsys.readouterr().out.splitlines()
    assert "operations and bytes a second" in question
    assert machine.startswith("machine   ")
    assert commit.startswith("commit    ")
    assert "3 rounds" in settings
    result = json.loads(last)
    assert result["hardware"]["name"] == DEVICE
    assert len(result["works"]) == 5
    saved = read_hardware(path)
    assert saved.bf16_flops == pytest.approx(result["hardware"]["bf16_flops"], rel=0.005)
    rates = read_rates(path)
    assert rates is not None
    assert (rates.product_us.xs, rates.layer_us.xs) == ((1, 4), (1, 2))
    assert path.read_text().startswith(f"# Measured by: serried bench kernels --save '{path}'\n# machine   ")


def test_steps_of_a_model_are_predicted_and_measured(capsys: pytest.CaptureFixture[str]):
    assert run_command("bench", ["kernels", "--check", "tiny-v3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = json.loads(lines[-1])["steps"]
    assert [step["requests"] for step in steps] == [1, 2]
    for step in steps:
        assert step["predicted_ms"] > 0 < step["measured_ms"]
        assert step["error"] == pytest.approx(step["predicted_ms"] / step["measured_ms"] - 1, abs=0.05)
    assert sum(" requests: a step takes " in line for line in lines) == 2
    assert run_command("bench", ["kernels", "--check", "tiny-v4"]) == REFUSED
    assert "did you mean tiny-v3?" in capsys.readouterr().err


def test_a_foreign_file_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "diary.toml"
    path.write_text("dear diary")
    monkeypatch.setattr(bench_kernels, "measure_kernels", None)
    assert run_command("bench", ["kernels", "--save", str(path)]) == REFUSED
    assert "exists and is no hardware profile" in capsys.readouterr().err
    assert path.read_text() == "dear diary"


def test_the_table_has_a_line_for_each_piece_of_work():
    rate = Rate(name="copy", unit="B/s", peak="memory_bytes_per_s", per_s=24.46e9, spread=0.042, rounds=3)
    cells = [list(column.cells) for column in rate_table([rate, replace(rate, peak="")]).columns]
    assert cells == [["copy"] * 2, ["24.5 GB/s"] * 2, ["4.2%"] * 2, ["memory_bytes_per_s", ""]]


def test_without_a_gpu_none_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_command("bench", ["kernels", "--device", "cuda"]) == REFUSED
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_models_experts_are_shared_only_where_there_are_enough():
    assert ranks_of(read_model_config("profiles/models/deepseek-v3.json"), 32) == 32
    assert ranks_of(read_model_config("profiles/models/deepseek-v2-lite.json"), 32) == 1
    assert ranks_of(read_model_config("profiles/models/deepseek-v2-lite.json"), 8) == 8


def test_gpu_times_are_told_beside_rooflines(capsys: pytest.CaptureFixture[str]):
    time = CaseTime(title="experts", us=200.0, spread_us=3.0, roof_us=80.0, published_us=124.0)
    tell([time], read_hardware("profiles/hardware/h200.toml"), settings="few")
    out = capsys.readouterr().out
    assert "40%" in out
    assert json.loads(out.splitlines()[-1])["kernels"][0]["published_us"] == 124.0
