"""`serried bench host`: real processes vote, a table and one line of JSON come out, and faults are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from launch.bench.bench import ABOUT, HostFlags, host_table, machine_line, summary
from launch.commands import REFUSED, parse_flags, run_command
from launch.groups.refusal import Refusal
from runtime.bench.host_bench import PARTS, HostTimes


def host(words: str) -> HostFlags:
    return parse_flags(HostFlags, words.split(), name="bench host", about=ABOUT)


def times(step_us: float) -> HostTimes:
    return HostTimes(
        parts_us=dict.fromkeys(PARTS, step_us / 10),
        step_us=step_us,
        late_step_us=2 * step_us,
        busy_vote_us=900.0,
        idle_vote_us=90.0,
        late_idle_vote_us=180.0,
    )


@pytest.mark.slow
def test_two_processes_measure_and_the_last_line_is_json():
    words = "bench host --ranks 2 --requests 8 --prompt-len 16 --steps 5 --votes 20"
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
    lines = done.stdout.splitlines()
    assert lines[0].endswith("?")
    assert [line.split()[0] for line in lines[1:4]] == ["machine", "commit", "settings"]
    result = json.loads(lines[-1])
    assert {"ranks": 2, "requests": 8, "steps": 5, "votes": 20}.items() <= result.items()
    assert set(result["parts_cpu_us"]) == set(PARTS)
    assert min(result["parts_cpu_us"].values()) > 0
    assert 0 < result["step_cpu_ms"] < 50
    assert result["vote_idle_ms"] > 0
    assert result["vote_busy_ms"] > 0


def test_the_json_has_the_slowest_ranks_figures_and_the_targets():
    result = summary([times(1000.0), times(1250.0), times(800.0)], host("--ranks 3"))
    assert (result["ranks"], result["step_cpu_ms"], result["target_step_cpu_ms"]) == (3, 1.25, 1.5)
    assert (result["vote_idle_ms"], result["vote_busy_ms"], result["target_vote_idle_ms"]) == (0.09, 0.9, 0.2)
    assert (result["step_cpu_p90_ms"], result["vote_idle_p90_ms"]) == (2.5, 0.18)
    assert json.loads(json.dumps(result)) == result


def test_the_table_has_a_line_for_each_part_the_step_and_the_votes():
    table = host_table([times(1000.0), times(1250.0), times(800.0)])
    names, first, middle, slowest, targets = [list(column.cells) for column in table.columns]
    assert names[: len(PARTS)] == list(PARTS)
    at = names.index("step, CPU time")
    assert (first[at], middle[at], slowest[at], targets[at]) == ("1000", "1000", "1250", "1500")


def test_the_machine_is_named_with_how_busy_it_is():
    assert f"{os.cpu_count()} cores, load " in machine_line()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "ranks is 0; it must be at least 1"),
        ("--votes 0", "votes is 0; it must be at least 1"),
        ("--requests 0", "requests is 0; it must be at least 1"),
        ("--temperature -1", "temperature"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, message: str):
    with pytest.raises(Refusal, match=message):
        host(words)


@pytest.mark.parametrize("words", [[], ["hosts"]])
def test_bench_without_its_second_word_says_what_there_is(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command("bench", words) == REFUSED
    said = capsys.readouterr().err
    assert "there is compile, " in said
    assert ", host, " in said
    assert "e.g. serried bench compile --help" in said
