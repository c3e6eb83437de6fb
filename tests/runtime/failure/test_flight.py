"""Flight records: what a board said is in the file, and a group's files say who stopped first."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.failure.board import Board, State
from runtime.failure.diagnosis import diagnose, diagnose_records
from runtime.failure.flight import (
    NUM_STEPS,
    FlightRecord,
    flight_path,
    last_words,
    leave_flight,
    read_board,
    read_flight,
    run_name,
    write_flight,
)
from runtime.failure.verdict import Phase, Reason, Verdict

STUCK = Verdict(culprit=2, reason=Reason.STUCK, cause="makes no progress", step=30, phase=Phase.COMBINE, layer=1)


def record(rank: int, *, steps: int, phases: tuple[Phase, ...], verdict: Verdict | None = None) -> FlightRecord:
    """A rank that ran whole steps before `steps`, and in that one came as far as the last of `phases`."""
    board = Board.create(rank=rank, size=4)
    board.state = State.READY
    for step in range(steps):
        for phase in (Phase.PROPOSE, Phase.VOTE, Phase.LAUNCH, Phase.DISPATCH, Phase.COMBINE, Phase.READ):
            board.stamp(phase, step, 1 if phase in (Phase.DISPATCH, Phase.COMBINE) else 0)
    for phase in phases:
        board.stamp(phase, steps, 1 if phase in (Phase.DISPATCH, Phase.COMBINE) else 0)
    board.wait()
    if verdict is not None:
        board.verdict = verdict
    found = read_board(board, written_by="rank")
    os.close(board.descriptor)
    return found


HUNG = (Phase.PROPOSE, Phase.VOTE, Phase.LAUNCH, Phase.DISPATCH)
AHEAD = (*HUNG, Phase.COMBINE)


def test_a_record_comes_back_from_its_file(tmp_path):
    board = Board.create(rank=1, size=4)
    board.stamp(Phase.DISPATCH, 3, 5)
    board.wait()
    error = Verdict(culprit=1, reason=Reason.RAISED, cause="raised ValueError: boom", step=3, phase=Phase.DISPATCH)
    board.raise_error(error, second_hand=False, trace="Traceback ...\nValueError: boom")
    board.verdict = STUCK
    written = read_board(board, written_by="rank")
    assert read_flight(write_flight(written, tmp_path)) == written
    assert written.last[2:] == (3, Phase.DISPATCH, 5, 1, True)
    os.close(board.descriptor)


def test_the_last_64_steps_are_kept(tmp_path):
    written = record(0, steps=100, phases=HUNG)
    assert {stamp.step for stamp in written.stamps} == set(range(100 - NUM_STEPS + 1, 101))
    found = json.loads(write_flight(written, tmp_path).read_text())
    assert len(found["steps"]) == NUM_STEPS
    assert [stamp[0] for stamp in found["steps"][-1]["stamps"]] == [2, 3, 5, 6, 6]
    assert read_flight(flight_path(tmp_path, 0)).place == written.place


def test_a_rank_without_a_stamp_has_a_record_too(tmp_path):
    board = Board.create(rank=0, size=1)
    leave_flight(board, tmp_path / "new" / "folder", written_by="pulse")
    found = read_flight(flight_path(tmp_path / "new" / "folder", 0))
    assert (found.last, found.written_by, found.state) == (None, "pulse", State.STARTING)
    assert found.words == "was before its first step"
    os.close(board.descriptor)


def test_a_record_that_cannot_be_written_is_said_and_changes_nothing_else(tmp_path, capfd):
    board = Board.create(rank=0, size=1)
    (tmp_path / "file").write_text("")
    leave_flight(board, tmp_path / "file", written_by="rank")
    leave_flight(board, None, written_by="rank")
    assert capfd.readouterr().err.startswith("serried: rank 0 left no flight record: ")
    os.close(board.descriptor)


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (-1, 4), (0, 0), (0, 10**12)])
def test_a_rank_that_no_group_has_is_refused(tmp_path, rank, size):
    path = write_flight(replace(record(0, steps=1, phases=HUNG), rank=rank, size=size), tmp_path)
    with pytest.raises(ValueError, match=f"is of rank {rank} of {size}; a group has ranks 0 to size - 1"):
        read_flight(path)


def test_runs_are_told_apart_by_a_name_that_does_not_tell_the_key():
    names = {run_name(bytes([number]) * 32) for number in range(50)}
    assert len(names) == 50
    assert all(len(name) == 16 for name in names)
    assert (b"\x07" * 32).hex()[:16] not in names


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 2, "rank": "x"}', '{"format": 2}', "7"]
)
def test_a_file_that_is_no_flight_record_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json: is (not a|not a whole|a) flight record"):
        read_flight(path)


def test_without_a_verdict_the_rank_behind_all_others_stopped_first():
    records = [record(rank, steps=30, phases=HUNG if rank == 2 else AHEAD) for rank in range(4)]
    found = diagnose_records(records)
    assert (found.first, found.step, found.phase, found.layer) == (2, 30, Phase.DISPATCH, 1)
    assert (found.verdict, found.agreed, found.missing) == (None, False, ())
    assert found.lines[0] == "rank 2 stopped first, in step 30, dispatch of layer 1"
    assert found.lines[1] == "the group came to no verdict"


def test_a_rank_a_step_behind_stopped_first_whatever_its_phase():
    records = [
        record(rank, steps=29 if rank == 3 else 30, phases=AHEAD if rank == 3 else HUNG[:1]) for rank in range(4)
    ]
    assert diagnose_records(records).first == 3


def test_the_verdict_names_a_rank_that_left_no_record(tmp_path):
    gone = Verdict(culprit=1, reason=Reason.GONE, cause="was killed", step=29, phase=Phase.READ)
    paths = [
        write_flight(record(rank, steps=30, phases=HUNG, verdict=gone), tmp_path) for rank in range(4) if rank != 1
    ]
    found = diagnose(paths)
    assert (found.first, found.step, found.phase, found.agreed, found.missing) == (1, 29, Phase.READ, True, (1,))
    assert "the group's verdict: rank 1 failed in step 29, read: was killed" in found.lines
    assert "rank 1 left no record" in found.lines


def test_the_culprits_own_record_says_where_it_stood():
    """The verdict knew an older stamp."""
    raised = replace(STUCK, step=28, phase=Phase.READ, layer=0)
    found = diagnose_records([record(rank, steps=30, phases=HUNG, verdict=raised) for rank in range(4)])
    assert (found.first, found.step, found.phase) == (2, 30, Phase.DISPATCH)


def test_records_that_disagree_are_said_to():
    verdicts = [STUCK, STUCK, STUCK, replace(STUCK, culprit=0)]
    found = diagnose_records([record(n, steps=3, phases=HUNG, verdict=verdict) for n, verdict in enumerate(verdicts)])
    assert (found.first, found.agreed) == (2, False)


def test_files_of_two_groups_or_of_one_rank_twice_are_refused(tmp_path):
    one = record(0, steps=1, phases=HUNG)
    with pytest.raises(ValueError, match=r"groups of \[4, 8\] ranks"):
        diagnose_records([one, replace(one, rank=1, size=8)])
    with pytest.raises(ValueError, match="two are of rank 0"):
        diagnose_records([one, one])
    with pytest.raises(ValueError, match="none were given"):
        diagnose([])


def test_the_last_words_are_one_line_with_the_place_of_the_record():
    words = last_words(STUCK, rank=0, directory=Path("folder"))
    assert words == (
        "serried: rank 2 failed in step 30, combine of layer 1: makes no progress "
        "[rank 0 ends; flight record folder/flight-rank0.json]"
    )
    assert last_words(STUCK, rank=0, directory=None).endswith("makes no progress [rank 0 ends]")
