"""Rates of a device: measured, written, read, and made into times of any model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.bench.bench_rates import check_exchange_target, save_exchange
from runtime.bench.rate_bench import RateSizes, measure_rates
from runtime.costs.costs import StepCosts, StepShape
from runtime.costs.curves import Curve
from runtime.costs.device_costs import Group, read_device_costs
from runtime.costs.hardware_file import write_hardware
from runtime.costs.rates import RatedOperations, Rates, read_rates
from runtime.costs.roofline import CostShape, RooflineOperations
from runtime.model.model_config import read_model_config
from runtime.weights.hardware import Hardware, read_hardware

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
LITE = CostShape.of(read_model_config(PROFILES / "models" / "deepseek-v2-lite.json"))
CPU = Hardware(
    name="CPU", memory_bytes=1 << 34, bf16_flops=200e9, fp8_flops=0, memory_bytes_per_s=20e9, link_bytes_per_s=2e9,
    network_bytes_per_s=0,
)  # fmt: skip
RATES = Rates(
    product_us=Curve((1, 64), (100, 400)),
    expert_us=Curve((1, 16), (120, 180)),
    expert_call_us=50,
    core_us=Curve((0, 1000), (0, 40_000)),
    layer_us=Curve((1, 64), (500, 900)),
    host_us=Curve((1, 64), (200, 2000)),
)
TINY = RateSizes(
    tokens=(1, 4), product=(64, 32), num_products=2, rows=(1, 2), expert=(64, 32), num_experts=2, contexts=(64,),
    heads=2, requests=2, decode_tokens=(1, 2), depths=(2, 3), prompt_len=4, outputs=(2, 4), tries=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rated(ranks: int = 1, rates: Rates = RATES, **changes) -> RatedOperations:
    return RatedOperations(rates=rates, bound=RooflineOperations(shape=LITE, hardware=CPU, ranks=ranks, **changes))


def test_a_layer_by_hand():
    """DeepSeek-V2-Lite, 13.76 M parameters of attention, 64 experts of 8.65 M, top 6, 2 shared; one token."""
    operations = rated()
    assert operations.attention_us(1, 500) == pytest.approx(13.76e6 / 1e6 * 100 + 20_000 * 16 * 1088 / 1e6, rel=0.01)
    visited = 64 * (1 - (1 - 6 / 64))
    routed = visited * (8.65 * 120 + 50)
    shared = (2 * 8.65 + 2048 * 64 / 1e6) * 100
    assert operations.experts_us(1, mean_tokens=1) == pytest.approx(shared + routed + 500, rel=0.002)
    frame = operations.frame
    assert frame.head_at(64) == pytest.approx(4 * frame.head_at(1)) == pytest.approx(102400 * 2048 / 1e6 * 400)
    assert (frame.host_at(1), frame.host_at(64)) == (200, 2000)


def test_all_experts_are_visited_by_many_tokens_and_imbalance_adds_rows():
    many = 1000.0
    level = rated().experts_us(1, mean_tokens=many)
    rows = many * 6 / 64
    expected = 64 * (3 * 2048 * 1408 / 1e6 * RATES.expert_us.at(rows) + 50)
    assert level - rated().experts_us(1, mean_tokens=0) == pytest.approx(expected, rel=1e-3)
    assert rated(imbalance=1.5).experts_us(1, mean_tokens=many) > 1.3 * level
    # four ranks bring as many tokens to a quarter of the experts
    assert rated(4).experts_us(1, mean_tokens=many / 4) < 0.3 * level


def test_exchanges_are_those_that_were_measured_or_else_the_bound():
    assert rated(4).exchange_us(8) == RooflineOperations(shape=LITE, hardware=CPU, ranks=4).exchange_us(8)
    sent = RooflineOperations(shape=LITE, hardware=CPU, ranks=4).sent_bytes(8)
    timed = replace(RATES, exchange_us=((4, Curve((0, 2 * sent), (0, 5000))), (8, Curve((0, sent), (0, 70_000)))))
    assert rated(4, timed).exchange_us(8) == pytest.approx(2500)
    assert rated(3, timed).exchange_us(8) < 2500
    assert rated(5, timed).exchange_us(8) > 70_000
    assert rated(16, timed).exchange_us(8) == RooflineOperations(shape=LITE, hardware=CPU, ranks=16).exchange_us(8)
    assert rated(1, timed).exchange_us(8) == 0


def test_more_tokens_never_take_less_time():
    costs = StepCosts(rated(4))
    steps = [costs.step_time([StepShape(decode_tokens=n, context_len=300)]).total_us for n in (1, 2, 7, 64, 500)]
    assert steps == sorted(steps)
    assert costs.step_time([StepShape(prefill_tokens=10, prefill_position=5)]).prefill_us > 0


def test_what_is_written_is_read_and_peaks_and_tables_stay(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    timed = replace(RATES, exchange_us=((4, Curve((1000, 5000), (20, 90))),))
    write_hardware(path, CPU, kind="CPU", comment=["by hand"], rates=timed)
    assert (read_rates(path), read_hardware(path)) == (timed, CPU)
    write_hardware(path, CPU, kind="CPU", comment=["again"], rates=replace(RATES, expert_call_us=60))
    assert read_rates(path) == replace(timed, expert_call_us=60)
    write_hardware(path, replace(CPU, bf16_flops=300e9), kind="CPU", comment=["peaks"])
    assert read_rates(path) == replace(timed, expert_call_us=60)
    text = path.read_text("utf-8")
    assert [text.count(part) for part in ("[rates]", "[[rates.exchange]]", "Microseconds;", "# peaks")] == [1, 1, 1, 1]


def test_rates_after_measured_costs_leave_them_letter_by_letter(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    before = (PROFILES / "hardware" / "h200.toml").read_text("utf-8").replace('name = "NVIDIA', 'name = "CPU')
    path.write_text(before, "utf-8")
    for _ in range(2):
        write_hardware(path, CPU, kind="CPU", comment=["x"], rates=RATES)
        tables = before[before.index("# Measured times of a decode step") :]
        text = path.read_text("utf-8")
        assert (tables in text, text.count("Microseconds;")) == (True, 1)
        assert read_rates(path) == RATES


def test_a_device_with_rates_is_timed_by_them(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    write_hardware(path, CPU, kind="CPU", comment=[], rates=RATES)
    costs = read_device_costs(path)
    assert costs.operations(LITE, Group(ranks=1)) == rated()
    assert costs.source(LITE) == "rates measured on CPU"


@pytest.mark.timeout(120)
def test_everything_is_measured_and_rises():
    rates = measure_rates(CPU, TINY)
    curves = [rates.product_us, rates.expert_us, rates.core_us, rates.layer_us, rates.host_us]
    assert all(left <= right for curve in curves for left, right in itertools.pairwise(curve.ys))
    assert min([curve.ys[-1] for curve in curves]) > 0
    assert rates.expert_call_us > 0
    assert [curve.xs for curve in curves] == [(1, 4), (1, 2), (0, 64), (1, 2), (1, 2)]


def test_an_exchange_is_added_to_rates_and_to_nothing_else(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    with pytest.raises(ValueError, match="has no rates; write them first: serried bench kernels --save"):
        check_exchange_target(path)
    write_hardware(path, CPU, kind="CPU", comment=["Measured by me"], rates=RATES)
    for us in (7, 9):
        save_exchange(path, ranks=4, us_of_bytes={500: us, 100: 3}, comment=["Exchange of 4 ranks by hand"])
    save_exchange(path, ranks=2, us_of_bytes={100: 2}, comment=[])
    found = read_rates(path)
    assert found == replace(RATES, exchange_us=((2, Curve((100,), (2,))), (4, Curve((100, 500), (3, 9)))))
    assert path.read_text("utf-8").startswith("# Measured by me\nname")
    assert read_hardware(path) == CPU


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[rates.core]", "[rates.heart]", "heart is unknown; the parts are product, expert"),
        ("expert_call_us = 50", "", "expert_call_us is missing; the parts are"),
        ("tokens = [1, 64]", "tokens = [64, 1]", "must be ascending"),
        ("ranks = 4", "ranks = 2", r"exchange has tables for \[2, 2\] ranks; they must ascend"),
    ],
)
def test_broken_rates_are_refused_in_words(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "cpu.toml"
    two = ((2, Curve((1,), (1,))), (4, Curve((1,), (1,))))
    write_hardware(path, CPU, kind="CPU", comment=[], rates=replace(RATES, exchange_us=two))
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(ValueError, match=message):
        read_rates(path)
