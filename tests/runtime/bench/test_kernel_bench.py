"""Tiny work is measured and becomes a profile that can be read; nothing but a CPU's profile is written over."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from runtime.bench.kernel_bench import LEAST_ROUNDS, Rate, Sizes, Work, exchange_works, hardware_of, measure_kernels
from runtime.costs.hardware_file import check_target, hardware_text, write_hardware
from runtime.weights.hardware import Hardware, read_hardware

PROFILES = Path(__file__).parents[3] / "profiles" / "hardware"
TINY = Sizes(
    products=(("small", 8, 32, 16), ("large", 16, 64, 32)),
    memory_bytes=1 << 16,
    rows=(2, 8),
    row_bytes=64,
    sent=16,
    rounds=3,
)
CPU = Hardware(
    name='CPU, a "fast" core',
    memory_bytes=16 << 30,
    bf16_flops=205_432_109_876.5,
    fp8_flops=0,
    memory_bytes_per_s=25.06e9,
    link_bytes_per_s=987_654_321.0,
    network_bytes_per_s=0,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(path: Path, hardware: Hardware = CPU) -> None:
    write_hardware(path, hardware, kind="CPU", comment=["Measured by hand.", "machine  a table"])


def test_every_peak_of_a_cpu_is_measured_and_the_rest_is_zero():
    rates = measure_kernels(TINY)
    assert {rate.peak for rate in rates} == {"bf16_flops", "memory_bytes_per_s", "link_bytes_per_s", ""}
    assert all(rate.per_s > 0 and rate.spread >= 0 and rate.rounds == 3 for rate in rates)
    hardware = hardware_of(rates, name="CPU")
    assert hardware.memory_bytes > 1 << 20
    assert min(hardware.bf16_flops, hardware.memory_bytes_per_s, hardware.link_bytes_per_s) > 0
    assert (hardware.fp8_flops, hardware.network_bytes_per_s) == (0, 0)


def test_a_peak_is_the_best_of_its_medians():
    work = Work(name="", unit="op/s", peak="bf16_flops", amount=6.0, run=lambda: None)
    slow = Rate.of(work, [2_000_000_000, 1_000_000_000, 3_000_000_000])
    assert (slow.per_s, slow.rounds) == (3.0, 3)
    assert slow.spread == pytest.approx((4.5 - 2.5) / 3)
    others = [replace(slow, peak=peak) for peak in ("memory_bytes_per_s", "link_bytes_per_s", "")]
    assert hardware_of([slow, replace(slow, per_s=5.0), *others], name="CPU").bf16_flops == 5.0


def test_products_and_copies_count_all_that_they_do():
    rates = {rate.name: rate for rate in measure_kernels(TINY)}
    assert set(rates) == {
        "small 8x32x16 bfloat16",
        "small 8x32x16 float32",
        "large 16x64x32 bfloat16",
        "large 16x64x32 float32",
        "read 0.0625 MiB",
        "copy 0.0625 MiB",
        "threads swap 2 rows of 64 B",
        "threads swap 8 rows of 64 B",
    }


def test_the_exchange_may_run_again_and_counts_what_leaves_one_rank():
    for work in exchange_works(TINY):
        work.run()
        work.run()
        assert work.amount == 16 * 64


def test_time_bounds_the_rounds_but_a_median_has_three():
    rates = measure_kernels(replace(TINY, rounds=1000, seconds=0.0))
    assert {rate.rounds for rate in rates} == {LEAST_ROUNDS}
    with pytest.raises(ValueError, match="rounds is 2; it must be at least 3"):
        replace(TINY, rounds=2)


def test_a_saved_profile_is_read_with_three_digits(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    save(path)
    found = read_hardware(path)
    assert found == replace(CPU, bf16_flops=205e9, memory_bytes_per_s=25.1e9, link_bytes_per_s=988e6)
    assert path.read_text().startswith("# Measured by hand.\n# machine  a table\n")
    save(path, replace(CPU, bf16_flops=1e12))
    assert read_hardware(path).bf16_flops == 1e12
    assert list(tmp_path.iterdir()) == [path]


def test_measured_costs_stay_letter_by_letter(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    before = (PROFILES / "h200.toml").read_text().replace('name = "NVIDIA', 'name = "CPU')
    path.write_text(before)
    save(path)
    assert path.read_text().endswith(before[before.index("# Measured times of a decode step") :])
    assert tomllib.loads(path.read_text())["costs"] == tomllib.loads(before)["costs"]
    assert read_hardware(path).memory_bytes == CPU.memory_bytes


def test_costs_that_would_be_lost_are_a_refusal(tmp_path: Path):
    path = tmp_path / "cpu.toml"
    before = hardware_text(CPU, comment=[]) + "costs = { host_us = 1.0 }\n"
    path.write_text(before)
    with pytest.raises(ValueError, match="its costs are not written as"):
        save(path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (b"dear diary\n", "exists and is no hardware profile, so it is left as it is"),
        (b'[project]\nname = "serried"\n', "exists and is no hardware profile"),
        (b"\xff\xfe", "exists and is no hardware profile"),
        (b"", "exists and is no hardware profile"),
        ((PROFILES / "h200.toml").read_bytes(), "is the profile of NVIDIA H200 SXM, not of a CPU"),
    ],
)
def test_a_foreign_file_is_left_as_it_is(tmp_path: Path, before: bytes, message: str):
    path = tmp_path / "foreign.toml"
    path.write_bytes(before)
    with pytest.raises(ValueError, match=message):
        save(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no folder"):
        check_target(tmp_path / "nowhere" / "cpu.toml", kind="CPU")


def test_a_link_to_a_profile_stays_a_link(tmp_path: Path):
    real, link = tmp_path / "real.toml", tmp_path / "cpu.toml"
    save(real)
    link.symlink_to(real)
    save(link, replace(CPU, bf16_flops=3e9))
    assert link.is_symlink()
    assert read_hardware(real).bf16_flops == 3e9


def test_the_profile_in_the_house_may_be_measured_anew():
    check_target(PROFILES / "cpu.toml", kind="CPU")
    assert asdict(read_hardware(PROFILES / "cpu.toml"))["fp8_flops"] == 0
