"""The requests of a benchmark: lengths, arrivals, traces, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from runtime.bench.workload import Workload, read_trace


def test_fixed_lengths_are_what_was_said_and_the_same_seed_gives_the_same_jobs():
    load = Workload(input_len=5, output_len=7, num_prompts=4)
    jobs = load.jobs(vocab=50, seed=3)
    assert [(len(job.prompt), job.output_len, job.arrival_s) for job in jobs] == [(5, 7, 0.0)] * 4
    assert all(0 <= token < 50 for job in jobs for token in job.prompt)
    assert jobs == load.jobs(vocab=50, seed=3)
    assert jobs != load.jobs(vocab=50, seed=4)
    assert load.longest == 12


def test_drawn_lengths_fill_their_range_and_never_leave_it():
    load = Workload(input_len=10, output_len=20, range_ratio=0.5, num_prompts=400)
    jobs = load.jobs(vocab=9, seed=0)
    assert {len(job.prompt) for job in jobs} == set(range(5, 16))
    assert {job.output_len for job in jobs} == set(range(10, 31))
    assert max(len(job.prompt) + job.output_len for job in jobs) <= load.longest == 45


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_come_at_the_rate_with_the_variance_of_their_burstiness(burstiness: float):
    load = Workload(num_prompts=20_001, request_rate=8.0, burstiness=burstiness, input_len=1)
    times = [job.arrival_s for job in load.jobs(vocab=2, seed=1)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert variance == pytest.approx(1 / 64 / burstiness, rel=0.12)


def test_arrivals_of_infinite_burstiness_are_evenly_spaced():
    load = Workload(num_prompts=3, request_rate=4.0, burstiness=math.inf, input_len=1)
    assert [job.arrival_s for job in load.jobs(vocab=2, seed=0)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("rate", [1e-6, 1e300])
@pytest.mark.parametrize("burstiness", [1e-3, 1e300])
def test_whatever_rate_and_burstiness_are_allowed_arrivals_are_numbers_that_do_not_go_back(
    rate: float, burstiness: float
):
    load = Workload(num_prompts=50, request_rate=rate, burstiness=burstiness, input_len=1)
    times = [job.arrival_s for job in load.jobs(vocab=2, seed=0)]
    assert all(math.isfinite(later) and later >= earlier for earlier, later in pairwise(times))


def test_skewed_prompts_ask_for_few_tokens_often():
    even, skewed = (
        Counter(t for job in Workload(input_len=200, skew=skew).jobs(vocab=100, seed=0) for t in job.prompt)
        for skew in (0.0, 1.0)
    )
    share = [counts.most_common(1)[0][1] / counts.total() for counts in (even, skewed)]
    assert share[0] < 0.015
    assert share[1] == pytest.approx(1 / sum(1 / n for n in range(1, 101)), rel=0.05)


def test_a_trace_says_when_and_how_long(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 + 250 * n, "input_length": 3 + n, "output_length": 2, "hash_ids": [n]} for n in range(4)]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    load = Workload(trace_file=path, num_prompts=3)
    jobs = load.jobs(vocab=10, seed=0)
    assert [(job.arrival_s, len(job.prompt), job.output_len) for job in jobs] == [(0, 3, 2), (0.25, 4, 2), (0.5, 5, 2)]
    assert load.longest == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no line"),
        ("[1]", "line 1 is no JSON object"),
        ("{", "line 1 is no JSON"),
        (
            '{"timestamp": 0, "input_length": 0, "output_length": 1}',
            "input_length is 0; it must be a number of at least 1",
        ),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp is -1"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}', "input_length is 1.5"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "input_length is True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp is nan"),
        ('{"timestamp": 0, "input_length": 1}', "output_length is None"),
        ("\n\udcff", "line 2 is no JSON: the text is not UTF-8"),
        ("[" * 100_000, "line 1 is no JSON: it is nested too deeply"),
        (
            '{"timestamp": 9, "input_length": 1, "output_length": 1}\n'
            '{"timestamp": 8, "input_length": 1, "output_length": 1}',
            "timestamp goes back",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        read_trace(path, limit=10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_len", 0),
        ("output_len", -1),
        ("num_prompts", 0),
        ("max_concurrency", 0),
        ("range_ratio", 1.0),
        ("request_rate", 0.0),
        ("request_rate", math.nan),
        ("request_rate", 1e-7),
        ("burstiness", -2.0),
        ("burstiness", 1e-320),
        ("skew", -1.0),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_by_its_field(field: str, value: float):
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be"):
        Workload(**{field: value})
