"""A traced step is drawn as it was: compute, waits and rows under way, track by track; and files are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbo import UNTIMED, Span, Timeline
from ep import ThreadGroup
from launch.cli import main
from launch.groups.place import GroupFlags
from launch.groups.trace import Trace, picture
from runtime.forward.tracing import TracedTransport

MS = 1_000_000
SPANS = [
    Span("turn", 0, "", 0, 4 * MS),
    Span("comm", 0, "dispatch 3", 4 * MS, 10 * MS),
    Span("turn", 1, "", 4 * MS, 8 * MS),
    Span("comm", 1, "dispatch 3", 8 * MS, 16 * MS),
    Span("wait", 0, "dispatch 3", 8 * MS, 10 * MS),
    Span("turn", 0, "", 8 * MS, 14 * MS),
    Span("step", 0, "step 7", 0, 16 * MS),
]


def test_a_column_is_what_fills_most_of_it():
    lines = picture(SPANS, rank=3, columns=11 + 16)
    assert lines == [
        "step 7 of rank 3: 16.00 ms, 2.00 ms of it exposed communication; a column is 1000 us",
        "track 0    ####    ..####",
        "rows           ======",
        "track 1        ####",
        "rows               ========",
        "# computes   . waits for rows   = rows under way",
    ]


def test_no_step_no_picture():
    assert picture([], rank=0, columns=80) == []
    assert picture(SPANS[:-1], rank=0, columns=80) == []


def test_without_a_path_nothing_is_noted_and_nothing_written():
    trace, [transport] = Trace(None), ThreadGroup(1).transports
    assert trace.timeline(0) is UNTIMED
    assert trace.transport(transport) is transport
    assert trace.finish() == []


def test_with_a_path_every_rank_of_the_process_writes_its_file(tmp_path: Path):
    trace = Trace(tmp_path / "steps.json")
    for transport in ThreadGroup(2).transports:
        assert isinstance(trace.transport(transport), TracedTransport)
        timeline = trace.timeline(transport.rank)
        assert isinstance(timeline, Timeline)
        assert timeline is trace.timeline(transport.rank)
        timeline.add("turn", transport.rank, "", timeline.now())
    [said, *_, last] = trace.finish()
    assert said == "rank 0: no step was traced"
    assert "steps.json" in last
    assert {path.name for path in tmp_path.iterdir()} == {"steps.json", "steps.rank1.json"}


@pytest.mark.parametrize("name", ["", "nowhere/trace.json"])
def test_a_trace_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=r"trace is .* it must be a file in a folder that is there, e.g. trace.json"):
        GroupFlags(trace=tmp_path / name)


def test_generate_draws_a_step_of_two_tracks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["generate", "profiles/models/tiny-v3", "--load-format", "dummy", "--ranks", "2", "--transport", "threads"]
    words += ["--dbo", "on", "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "1"]
    words += ["--max-num-seqs", "4", "--num-blocks", "16", "--max-tokens", "3", "--ignore-eos"]
    for prompt in ("one", "two", "three", "four"):
        words += ["--prompt", prompt]
    assert main([*words, "--trace", str(tmp_path / "trace.json")]) == 0
    said = capsys.readouterr().err
    assert "steps ran in several tracks" in said
    assert "exposed communication" in said
    assert [line[:7] for line in said.splitlines() if line.startswith("track ")] == ["track 0", "track 1"]
    for name in ("trace.json", "trace.rank1.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert {event["cat"] for event in events if event["ph"] == "X"} == {"step", "turn", "comm", "wait"}


def test_the_table_of_gains_is_printed_and_ends_in_json(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--scenario", "overlap", "--rows-per", "experts", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    cells = json.loads(last)
    assert len(cells) == 32
    [cell] = [cell for cell in cells if (cell["ranks"], cell["tokens"], cell["context_len"]) == (32, 128, 2048)]
    assert cell["choice"] == "cut"
    assert cell["gain"] == pytest.approx(0.29, abs=0.1)
    [line] = [line.split() for line in lines if line.split()[:3] == ["32", "128", "2048"]]
    assert line[-1] == "on"
    assert any("on 0 multiprocessors" in line for line in lines)


def test_exchanges_cannot_take_all_multiprocessors(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--scenario", "overlap", "--comm-sms", "132"]) == 2
    assert "comm_sms is 132; NVIDIA H200 SXM has 132 multiprocessors" in capsys.readouterr().err


def test_a_simulated_group_tells_its_cut_steps(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--ranks", "2", "--seconds", "3", "--dbo", "auto"]) == 0
    assert "overlap          0 steps cut; whole: " in capsys.readouterr().out
