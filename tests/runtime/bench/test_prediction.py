"""Bytes and operations of DeepSeek-V3 against published arithmetic, and the signed error by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime import read_model_config
from runtime.bench.prediction import MeasuredStep, prediction_figures, step_bytes, step_flops, use_figures
from runtime.costs.roofline import CostShape, RooflineOperations
from runtime.weights.hardware import Hardware

MODELS = Path(__file__).resolve().parents[3] / "profiles" / "models"
V3 = CostShape.of(read_model_config(MODELS / "deepseek-v3.json"))
DEVICE = Hardware(
    name="x", memory_bytes=1, bf16_flops=1e12, fp8_flops=2e12, memory_bytes_per_s=1e12, link_bytes_per_s=1e12,
    network_bytes_per_s=1e12,
)  # fmt: skip
STEP = MeasuredStep(
    step_ms=50.0, step_cpu_ms=None, tokens=128.0, mean_tokens=128.0, context_len=2048.0, ranks=32, sharing=1.0
)


def test_operations_of_a_token_are_those_of_the_papers_arithmetic():
    # V3 at a context of 2,048: 108.0 GFLOP a token, 142.8 at 4,096.
    assert step_flops(V3, STEP) / 128 == pytest.approx(108.0e9, rel=0.01)
    assert step_flops(V3, replace(STEP, context_len=4096.0)) / 128 == pytest.approx(142.8e9, rel=0.01)


def test_bytes_are_weights_of_the_experts_that_are_touched_and_latents():
    # Of one rank of 32: 203.9 MB attention a layer, 8 + 1 experts of 44.04 MB in each of 58 layers, three dense MLPs of
    # 396 MB, a head of 1.85 GB, routers of 3.67 MB, latents of 1,152 B a token and layer.
    weights = 61 * 203.9e6 + 58 * (9 * 44.04e6 + 3.67e6) + 3 * 396.4e6 + 1.853e9
    latents = 61 * 1152 * 128 * 2048
    assert step_bytes(V3, STEP, width=1) == pytest.approx(weights + latents, rel=0.002)


def test_few_tokens_touch_few_experts():
    one = replace(STEP, mean_tokens=1.0, tokens=1.0, ranks=1, context_len=0.0)
    grown = step_bytes(V3, replace(one, mean_tokens=2.0), width=1) - step_bytes(V3, one, width=1)
    touched = 256 * ((1 - (1 - 8 / 256) ** 2) - 8 / 256)
    assert grown == pytest.approx(58 * touched * 44.04e6, rel=0.001)


def test_use_is_what_is_needed_over_what_could_be_done_in_the_time():
    found = use_figures(V3, DEVICE, STEP, width=1)
    assert found["mbu"] == pytest.approx(step_bytes(V3, STEP, width=1) / 0.050 / 1e12)
    assert found["mfu"] == pytest.approx(step_flops(V3, STEP) / 0.050 / 2e12), "fp8 where the model is stored so"
    shared = use_figures(V3, DEVICE, replace(STEP, sharing=4.0), width=1)
    assert shared["mbu"] == pytest.approx(4 * found["mbu"]), "four ranks' bytes in the same step"


def test_the_error_is_signed_and_ranks_that_share_a_core_take_turns():
    operations = RooflineOperations(shape=V3, hardware=DEVICE, ranks=32)
    alone = prediction_figures(operations, STEP)
    assert alone["signed_error"] == pytest.approx(alone["predicted_step_ms"] / 50.0 - 1)
    assert (alone["measured_cpu_ms"], alone["signed_error_cpu"]) == (None, None)
    shared = prediction_figures(operations, replace(STEP, sharing=2.0, step_cpu_ms=10.0))
    assert shared["predicted_step_ms"] == pytest.approx(2 * alone["predicted_step_ms"])
    assert shared["predicted_cpu_ms"] == pytest.approx(alone["predicted_step_ms"])
    assert shared["signed_error_cpu"] == pytest.approx(alone["predicted_step_ms"] / 10 - 1)
    assert sum(alone["predicted_parts_ms"].values()) == pytest.approx(alone["predicted_step_ms"])
