"""The cases that are measured on a GPU agree with torch in the interpreter, and say honestly what they have to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.bench.kernel_case import CaseSize, KernelCase, roof_us, worst_difference
from runtime.bench.kernel_cases import kernel_cases
from runtime.bench.kernel_times import time_cases
from runtime.costs.cost_tables import read_cost_tables
from runtime.model.model_config import Fp8BlockQuant, ModelConfig, read_model_config
from runtime.weights.hardware import read_hardware

SIZE = CaseSize(batch=3, context=70, ranks=4)


def cases(model: ModelConfig, size: CaseSize = SIZE) -> list[KernelCase]:
    return list(kernel_cases(model, size, name="tiny", device=torch.device("cpu"), dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    return read_model_config("profiles/models/tiny-v3")


@pytest.mark.interpret
def test_kernels_agree_with_torch(tiny):
    off = {case.title: (worst_difference(case), case.bound) for case in cases(tiny)}
    assert len(off) == 9
    assert {title: found for title, (found, bound) in off.items() if found > bound} == {}


@pytest.mark.interpret
def test_kernels_that_read_fp8_agree_with_torch(tiny):
    stored = replace(tiny, quantization=Fp8BlockQuant())
    off = {case.title: (worst_difference(case), case.bound) for case in cases(stored) if case.fast == "fp8"}
    assert len(off) == 4  # three projections and the experts
    assert {title: found for title, (found, bound) in off.items() if found > bound} == {}


def test_a_wrong_row_or_a_nan_is_a_difference():
    right, wrong = torch.ones(2, 4), torch.ones(2, 4)
    wrong[1, 2] = 1.5
    case = KernelCase(title="", run={"triton": wrong, "reference": right}.__getitem__, num_bytes=0)
    assert worst_difference(case) == 0.5
    wrong[1, 2] = float("nan")
    assert worst_difference(case) == float("inf")


def test_v3s_cases_have_the_rooflines_of_the_published_accounting():
    """Core 73.8 us, eight experts 73.4 us: H200, EP32, 128 tokens at 2k. Nothing is computed: the meta device."""
    v3 = read_model_config("profiles/models/deepseek-v3.json")
    hardware = read_hardware("profiles/hardware/h200.toml")
    peaks = {"fp8": hardware.fp8_flops, "bf16": hardware.bf16_flops}
    core = KernelCase(
        title="", run=lambda _: torch.zeros(1), flops=2.0 * 128 * 1088 * 128 * 2048, num_bytes=1152.0 * 128 * 2048
    )
    assert roof_us(core, peaks, hardware.memory_bytes_per_s) == pytest.approx(73.8, abs=0.1)
    assert v3.mla.num_heads == 128


class Ticks:
    """A clock on which every call takes 5 us."""

    def __init__(self) -> None:
        self.now = 0

    def stamp(self) -> int:
        self.now += 5
        return self.now

    def between_us(self, begin: int, end: int) -> float:
        return float(end - begin)


def test_times_are_medians_beside_roofs_and_published_ones():
    calls = []
    case = KernelCase(
        title="experts",
        run=calls.append,
        flops=0,
        num_bytes=4.8e6,
        slots=8,
        fast="fp8",  # type: ignore[arg-type]
    )
    hardware = read_hardware("profiles/hardware/h200.toml")
    tables = read_cost_tables("profiles/hardware/h200.toml")
    [time] = time_cases(
        [case], CaseSize(), hardware=hardware, tables=tables, rounds=4, flush=lambda: None, clock=Ticks()
    )
    assert (time.us, time.spread_us, time.roof_us, time.published_us) == (5.0, 0.0, pytest.approx(1.0), 124.0)
    assert calls == ["triton"] * 6
