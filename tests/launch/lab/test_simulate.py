from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from launch.cli import main
from runtime.scheduling.heartbeat import decide
from runtime.simulation import simulation

KEYS = [
    "ranks", "interval", "output_throughput", "p50_itl_ms", "p99_itl_ms", "mean_ttft_ms", "p99_ttft_ms",
    "balance_ratio", "deferred_steps",
]  # fmt: skip


@pytest.fixture
def simulated(capsys):
    """simulated(line) -> the lines on standard output; the exit code was 0."""

    def run(line: str) -> list[str]:
        assert main(["simulate", *line.split()]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.splitlines()

    return run


@pytest.mark.parametrize("interval", ["1", "2", "4", "auto"])
def test_json_ends_with_one_line_of_numbers(simulated, interval):
    lines = simulated(f"--ranks 8 --scenario one-long-prefill --prefill-schedule-interval {interval} --json")
    record = json.loads(lines[-1])
    assert list(record) == KEYS
    assert (record["ranks"], str(record["interval"])) == (8, interval)
    assert all(isinstance(record[key], int | float) for key in KEYS[2:])
    assert not any(line.startswith("{") for line in lines[:-1])


def test_the_picture_shows_who_waits_for_whom(simulated):
    lines = simulated("--scenario one-long-prefill --prefill-schedule-interval 4")
    rows = [line for line in lines if line.startswith("rank ")]
    busy = [row for row in rows if "#" in row]
    assert (len(rows), len(busy)) == (8, 1)
    assert re.search(r"d{3}#+d{3}#+d{3}#+d{3}#+", busy[0])
    assert re.search(r"waits +0%$", busy[0])
    for row in rows:
        assert row in busy or re.search(r"ddd\.+dddd\.+dddd\.+dddd\.+.*waits +9\d%$", row)


def test_the_report_says_what_was_simulated_and_what_came_of_it(simulated):
    lines = simulated("--scenario burst --ranks 3 --prefill-schedule-interval 2 --seed 5")
    assert lines[:3] == [
        "burst: 16 requests decode on each rank, and 3 prompts of 6k come at once",
        "3 ranks, interval 2, async depth 1, 2048 tokens a step at most",
        "step times: tables of DeepSeek-V3 on NVIDIA H200 SXM; prompts of 1k at 7,212 tokens/s a rank, beyond 4k "
        "extrapolated",
    ]
    assert [line.split()[0] for line in lines[-6:]] == ["output", "between", "first", "balance", "prompts", "run"]
    assert re.search(r"put off in \d+ steps, 1 in a row at most; released: beat 4$", lines[-2])
    assert re.search(r"--seed 5 replays it: [0-9a-f]{12}$", lines[-1])


def test_the_same_seed_prints_the_same_and_another_one_does_not(simulated):
    line = "--scenario burst --ranks 2 --fault slow-rank --fault reordered-messages --seed"
    assert simulated(f"{line} 3") == simulated(f"{line} 3") != simulated(f"{line} 4")


def test_a_short_steady_stream_is_simulated_with_its_own_rate(simulated):
    lines = simulated("--ranks 2 --rate 4 --seconds 6 --json")
    assert lines[0] == "steady: prompts of 1k, outputs of 200, 4 requests/s for 6 s; waits read from 3.5 s on"
    assert json.loads(lines[-1])["output_throughput"] > 0


def test_a_fault_that_ends_the_group_is_drawn_and_named(simulated):
    lines = simulated("--scenario burst --fault lost-rank --seed 3 --json")
    [fault] = [line for line in lines if line.startswith("fault: ")]
    rank, step = re.findall(r"\d+", fault)
    [ended] = [line for line in lines if line.startswith("ended ")]
    assert re.search(rf"rank {rank} failed in step {step}, .*: nothing was heard of its pulse for 2\.\d s; \d+", ended)
    rows = [line for line in lines if line.startswith("rank ")]
    assert [line.split()[1] for line in rows if "xxxxx" in line] == [rank]
    assert json.loads(lines[-1])["ranks"] == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 0", "ranks is 0; it must be from 1 to 320, e.g. 8"),
        ("--max-num-batched-tokens 0", "max_num_batched_tokens is 0; it must be a whole number of at least 1"),
        ("--scenario burst --seconds 4", "seconds is 4.0; it must be left out, since scenario burst has its own times"),
        ("--num-blocks 3", "num_blocks is 3; the longest request needs 20 of 64 tokens, e.g. 20"),
        ("--prefill-schedule-interval 0", "prefill_schedule_interval is 0; it must be auto or"),
        ("--gpu cpu", "has no [costs]: nothing was measured on this device"),
        ("--gpu h20", "'h20' is not a device in profiles/hardware; did you mean h200?"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(capsys, line, message):
    assert main(["simulate", *line.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_rule_that_breaks_ends_with_exit_code_1_and_the_seed(capsys, monkeypatch):
    def greedy(votes, state):
        plan, after = decide(votes, state)
        return replace(plan, bucket=plan.bucket - 1 if plan.bucket > 1 else plan.bucket), after

    monkeypatch.setattr(simulation, "decide", greedy)
    assert main(["simulate", "--scenario", "burst", "--seed", "17"]) == 1
    said = capsys.readouterr()
    assert said.err == "serried: rank 0 runs more than the bucket holds (in step 1; seed 17 replays it)\n"
