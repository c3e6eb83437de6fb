"""`serried doctor`: the answer, the picture and the exit code, from records of boards that tell a known story."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cli import main
from launch.observe.last_steps import Picture
from runtime.failure.board import Board, Stamp, State
from runtime.failure.flight import FlightRecord, read_board, write_flight
from runtime.failure.verdict import Phase, Reason, Verdict

MS = 1_000_000
STOPPED = Verdict(
    culprit=2, reason=Reason.STOPPED, cause="its process is stopped", step=7, phase=Phase.DISPATCH, layer=3
)
Place = tuple[int, int, Phase, int, bool]
"""A stamp: ms, step, phase, layer, waits."""

BEFORE: list[Place] = [
    (10 * step + at, step, phase, 3 if phase in (Phase.DISPATCH, Phase.COMBINE) else 0, waits)
    for step in range(4, 7)
    for at, phase, waits in [
        (0, Phase.LAUNCH, False),
        (2, Phase.DISPATCH, False),
        (4, Phase.DISPATCH, True),
        (6, Phase.COMBINE, False),
        (8, Phase.READ, False),
    ]
]


def record(rank: int, last: Sequence[Place], *, size: int = 4, verdict: Verdict | None = STOPPED) -> FlightRecord:
    """Steps 4 to 6 like everybody, then `last`; written at 100 ms."""
    board = Board.create(rank=rank, size=size)
    board.state = State.READY
    if verdict is not None:
        board.verdict = verdict
    found = read_board_without_stamps(board)
    os.close(board.descriptor)
    stamps, exchanges, at_step = [], 0, -1
    for ms, step, phase, layer, waits in [*BEFORE, *last]:
        exchanges = 0 if step != at_step else exchanges
        at_step = step
        exchanges += phase in (Phase.DISPATCH, Phase.COMBINE) and not waits
        stamps.append(Stamp(len(stamps), ms * MS, step, phase, layer, exchanges, waits=waits))
    return replace(found, stamps=tuple(stamps), monotonic_ns=100 * MS, wall_ns=10**18 + 100 * MS)


def read_board_without_stamps(board: Board) -> FlightRecord:
    board.stamp(Phase.BETWEEN, 0)
    return replace(read_board(board, written_by="rank"), stamps=())


LAUNCHED: list[Place] = [(70, 7, Phase.LAUNCH, 0, False), (72, 7, Phase.DISPATCH, 3, False)]
WAITED: list[Place] = [*LAUNCHED, (74, 7, Phase.DISPATCH, 3, True)]


def group() -> list[FlightRecord]:
    return [record(rank, LAUNCHED if rank == 2 else WAITED) for rank in range(4)]


def write(folder: Path, records: Sequence[FlightRecord]) -> Path:
    folder.mkdir(exist_ok=True)
    for one in records:
        write_flight(one, folder)
    return folder


def test_the_answer_says_who_where_and_what_the_others_waited_for(tmp_path, capsys):
    assert main(["doctor", str(write(tmp_path / "flight", group()))]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "rank 2 stopped first, in step 7, dispatch of layer 3"
    assert lines[1] == "ranks 0, 1 and 3 waited in step 7, dispatch of layer 3, for the tokens of rank 2"
    assert "the group's verdict: rank 2 failed in step 7, dispatch of layer 3: its process is stopped" in lines
    assert err == ""


def test_the_picture_shows_the_last_steps_of_every_rank_and_where_the_first_stopped():
    records = {one.rank: one for one in group()}
    lines = Picture(records=records, first=2, steps=2, columns=14).lines()
    assert lines[0] == "step      6         7"
    rows = [line.split(maxsplit=2)[2] for line in lines[1:5]]
    assert rows == [
        "llDD..CCrrllDD.... 0.026 s",
        "llDD..CCrrllDD.... 0.026 s",
        "llDD..CCrrllDxxxxx 0.028 s",
        "llDD..CCrrllDD.... 0.026 s",
    ]
    assert lines[5] == "a column: 1 ms"


def test_ranks_of_machines_that_started_at_other_times_are_drawn_together():
    here, there = record(0, WAITED), record(1, WAITED)
    day = 86_400 * 10**9
    there = replace(
        there,
        monotonic_ns=there.monotonic_ns + day,
        stamps=tuple(stamp._replace(ns=stamp.ns + day) for stamp in there.stamps),
    )
    lines = Picture(records={0: here, 1: there}, first=3, steps=2, columns=14).lines()
    assert lines[1].split(maxsplit=2)[2] == lines[2].split(maxsplit=2)[2] == "llDD..CCrrllDD.... 0.026 s"


def test_files_may_be_named_one_by_one_and_missing_ranks_are_said(tmp_path, capsys):
    folder = write(tmp_path / "flight", group())
    assert main(["doctor", str(folder / "flight-rank0.json"), str(folder / "flight-rank3.json"), "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rank 2 stopped first, in step 7, dispatch of layer 3\n")
    assert "ranks 0 and 3 waited in step 7, dispatch of layer 3, for the tokens of rank 2" in out
    assert "rank 1 left no record" in out
    assert "step      7" in out


def test_who_worked_and_who_never_began_is_told_apart(tmp_path, capsys):
    working: list[Place] = [*WAITED, (75, 7, Phase.COMBINE, 3, False)]
    records = [record(0, WAITED), record(1, working), record(2, LAUNCHED), replace(record(3, []), stamps=())]
    assert main(["doctor", str(write(tmp_path, records))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "rank 3 had no first step",
        "rank 0 waited in step 7, dispatch of layer 3, for the tokens of rank 2",
        "rank 1 worked in step 7, combine of layer 3",
    ]


def test_an_answer_without_a_verdict_is_not_certain(tmp_path, capsys):
    records = [record(rank, LAUNCHED if rank == 1 else WAITED, verdict=None) for rank in range(4)]
    assert main(["doctor", str(write(tmp_path, records))]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 1 stopped first")
    assert "not certain: no record has the group's verdict" in out


def test_records_of_two_runs_are_not_taken_for_one(tmp_path, capsys):
    records = group()
    records[3] = replace(records[3], wall_ns=records[3].wall_ns - 3600 * 10**9)
    assert main(["doctor", str(write(tmp_path, records))]) == 1
    assert "not certain: the records were written 3,600 s apart" in capsys.readouterr().out


def test_idle_time_before_the_last_wave_is_left_out():
    idle: list[Place] = [(70, 6, Phase.IDLE, 0, False), (5000, 7, Phase.LAUNCH, 0, False)]
    one = replace(record(0, idle), monotonic_ns=5100 * MS, wall_ns=10**18 + 5100 * MS)
    window = Picture(records={0: one}, first=0, steps=4).window()
    assert window is not None
    assert (window.begin_ns, window.end_ns) == (10**18 + 5000 * MS, 10**18 + 5000 * MS)
    assert Picture(records={0: one}, first=0, steps=4).lines()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "is not a flight record, for it has no format; a run with --flight-dir writes one"),
        ("[1, 2", "is not a flight record, for it is not JSON"),
        ("", "is not a flight record"),
        ("[]", "is not a flight record, for it has no format"),
    ],
)
def test_a_file_that_is_no_flight_record_is_refused_by_name(tmp_path, capsys, text, words):
    path = tmp_path / "answers.json"
    path.write_text(text)
    assert main(["doctor", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"serried: {path}: {words}")
    assert err.count("\n") == 1


def test_what_is_not_there_is_refused_in_words(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no flight-rank*.json" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "--steps", "0"]) == 2
    assert "steps is 0; it must be at least 1" in capsys.readouterr().err


def test_of_a_folder_with_two_runs_the_newest_counts(tmp_path, capsys):
    """A group of eight was recorded there before; four of its files are still there beside those of four ranks."""
    hour = 3600 * 10**9
    older = [
        replace(one, run="older", wall_ns=one.wall_ns - hour) for one in (record(r, WAITED, size=8) for r in range(8))
    ]
    folder = write(write(tmp_path, older), [replace(one, run="newer") for one in group()])
    assert main(["doctor", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "left out: the records that ranks 4, 5, 6 and 7 of older runs left there" in out
    assert "rank 2 stopped first" in out
    assert main(["doctor", *map(str, sorted(folder.glob("*.json")))]) == 2
    assert "are of 2 runs (newer, older); give the files of one run" in capsys.readouterr().err


def test_one_rank_given_twice_is_refused(tmp_path, capsys):
    folder = write(tmp_path, group())
    assert main(["doctor", str(folder), str(folder / "flight-rank1.json")]) == 2
    assert "two are of rank 1" in capsys.readouterr().err


def test_of_many_ranks_the_first_and_those_behind_are_drawn():
    records = {rank: record(rank, LAUNCHED if rank == 30 else WAITED, size=40) for rank in range(40)}
    lines = Picture(records=records, first=30, steps=2).lines()
    assert sum(line.startswith("rank ") for line in lines) == 16
    assert any(line.startswith("rank 30") for line in lines)
    assert "and 24 more ranks" in lines
