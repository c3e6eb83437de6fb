"""`serried bench exchange`: every way is measured on threads and processes, and faults are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from ep import ExchangeBytes, ExchangeConfig
from ep.exchange_bench import ExchangeTimes, Load
from launch.bench.bench_exchange import ABOUT, ExchangeFlags
from launch.bench.exchange_report import Line, link_us
from launch.commands import REFUSED, parse_flags, run_command
from launch.groups.refusal import Refusal
from runtime.costs.curves import Curve
from runtime.costs.hardware_file import write_hardware
from runtime.costs.rates import Rates, read_rates
from runtime.weights.hardware import Hardware, read_hardware


def flags(words: str) -> ExchangeFlags:
    return parse_flags(ExchangeFlags, words.split(), name="bench exchange", about=ABOUT)


CPU = Hardware(
    name="CPU", memory_bytes=1 << 34, bf16_flops=2e11, fp8_flops=0, memory_bytes_per_s=2e10, link_bytes_per_s=2e9,
    network_bytes_per_s=0,
)  # fmt: skip
FLAT = Curve((1,), (1,))
RATES = Rates(product_us=FLAT, expert_us=FLAT, expert_call_us=1, core_us=FLAT, layer_us=FLAT, host_us=FLAT)
SMALL = "--tokens 3 5 --hidden 64 --slots 4 --top-k 2 --rounds 2"


def test_threads_measure_every_way_and_the_last_line_is_json(capsys):
    hardware = "profiles/hardware/h200.toml"
    words = f"exchange --ranks 4 --transport threads --node-size 2 {SMALL} --hardware {hardware}"
    assert run_command("bench", words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("?")
    assert [line.split()[0] for line in lines[1:5]] == ["machine", "commit", "settings", "hardware"]
    result = json.loads(lines[-1])
    assert {"ranks": 4, "node_size": 2, "transport": "threads", "rounds": 2}.items() <= result.items()
    ways = [(line["tokens"], line["exchange"], line["hierarchical"]) for line in result["lines"]]
    assert ways == list(product((3, 5), ("exact", "bounded"), ("off", "on")))
    for line in result["lines"]:
        for name in ("exchange_us", "wire_us", "plain_us", "ratio", "packing_cpu_us", "network_bytes"):
            assert line[name] > 0, (name, line)
        assert line["wire_us"] <= line["exchange_us"]
        assert line["hardware_us"] >= 0


def test_times_are_saved_for_the_cost_model_into_a_file_with_rates_and_no_other(capsys, tmp_path):
    path = tmp_path / "cpu.toml"
    words = f"exchange --ranks 2 --transport threads {SMALL} --save {path}"
    assert run_command("bench", words.split()) == 2
    assert "has no rates; write them first: serried bench kernels --save" in capsys.readouterr().err
    write_hardware(path, CPU, kind="CPU", comment=["by hand"], rates=RATES)
    assert run_command("bench", words.split()) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    saved = read_rates(path)
    assert saved is not None
    [(ranks, curve)] = saved.exchange_us
    exact = [line["exchange_us"] for line in result["lines"] if line["exchange"] == "exact"]
    assert (ranks, len(curve.xs)) == (2, 2)
    assert curve.ys[0] == pytest.approx(exact[0], rel=0.01)
    assert "# Exchange of 2 ranks by: serried bench exchange, commit " in path.read_text("utf-8")


@pytest.mark.slow
def test_two_processes_measure_what_was_asked_for():
    words = f"bench exchange --ranks 2 --exchange bounded --combine slots {SMALL}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words.split()],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environ,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"ranks": 2, "transport": "gloo", "combine": "slots"}.items() <= result.items()
    assert [(line["tokens"], line["exchange"]) for line in result["lines"]] == [(3, "bounded"), (5, "bounded")]


def test_a_line_has_the_slowest_ranks_figures_and_ratios_to_the_plain_all_to_all():
    times = [
        ExchangeTimes(whole_us=300.0, wire_us=200.0, plain_us=100.0, packing_cpu_us=40.0, sent=ExchangeBytes(9, 8)),
        ExchangeTimes(whole_us=150.0, wire_us=210.0, plain_us=200.0, packing_cpu_us=60.0, sent=ExchangeBytes(7, 6)),
    ]
    load = Load(tokens=3, hidden=4, num_slots=2, top_k=1, dtype=torch.bfloat16)
    line = Line(load=load, config=ExchangeConfig(exchange="bounded", hierarchical="on"), times=times)
    found = line.summary(None)
    assert line.name == "bounded, over nodes"
    assert (found["exchange_us"], found["plain_us"], found["ratio"], found["wire_ratio"]) == (300.0, 200.0, 1.5, 1.05)
    assert (found["packing_cpu_us"], found["network_bytes"], found["node_bytes"]) == (60.0, 9, 8)
    assert json.loads(json.dumps(found)) == found


def test_the_devices_figure_is_the_longer_of_node_and_network():
    hardware = read_hardware("profiles/hardware/h200.toml")
    times = ExchangeTimes(
        whole_us=1.0, wire_us=1.0, plain_us=1.0, packing_cpu_us=1.0, sent=ExchangeBytes(network=50_000, node=900_000)
    )
    assert link_us(times, hardware) == pytest.approx(900_000 / 450e9 * 1e6)
    more = ExchangeTimes(
        whole_us=1.0, wire_us=1.0, plain_us=1.0, packing_cpu_us=1.0, sent=ExchangeBytes(network=500_000, node=0)
    )
    assert link_us(more, hardware) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "ranks is 0; it must be at least 1, e.g. 4"),
        ("--tokens 4 0", r"tokens is \(4, 0\); each must be at least 1, e.g. 128"),
        ("--dtype float64 --dispatch-dtype fp8", "dispatch_dtype = 'fp8': in a float64 run nothing is narrower"),
        ("--exchange fast", "exchange"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words, message):
    with pytest.raises(Refusal, match=message):
        flags(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 4 --node-size 3", "node_size = 3: must divide the number of ranks, 4; for example 2"),
        ("--ranks 2 --transport mpi", "transport is mpi, but what started this is"),
        ("--ranks 4 --node-size 2 --hardware profiles/hardware/cpu.toml", "which has no network; leave node_size out"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words, message, capsys):
    assert run_command("bench", ["exchange", *words.split()]) == REFUSED
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
