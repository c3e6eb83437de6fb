"""The board: what the rank writes the pulse reads, also across processes, and a stamp costs next to nothing."""

from __future__ import annotations

import os
import subprocess
import time
import timeit

import pytest

from runtime.failure.bare import bare_script
from runtime.failure.board import RECORDS, TRACE_BYTES, Board, Stamp, State
from runtime.failure.verdict import (
    BEFORE_STEPS,
    TEXT_BYTES,
    UNKNOWN_STEP,
    Phase,
    Reason,
    Verdict,
    one_line,
    pack_verdict,
    unpack_verdict,
)

VERDICT = Verdict(
    culprit=3, reason=Reason.RAISED, cause="raised ValueError: boom", step=17, phase=Phase.COMBINE, layer=2
)


@pytest.fixture
def board():
    board = Board.create(rank=2, size=4)
    yield board
    os.close(board.descriptor)


def test_a_new_board_knows_its_rank_and_nothing_else(board):
    assert (board.rank, board.size, board.pid, board.state) == (2, 4, os.getpid(), State.STARTING)
    assert (board.last_stamp(), board.verdict, board.error, board.trace, board.stamps()) == (None, None, None, "", [])


def test_the_last_stamp_is_where_the_rank_stands(board):
    before = time.monotonic_ns()
    board.stamp(Phase.PROPOSE, 7)
    board.stamp(Phase.DISPATCH, 7, 3)
    board.wait()
    stamp = board.last_stamp()
    assert stamp[2:] == (7, Phase.DISPATCH, 3, 1, True)
    assert stamp.number == 2
    assert before <= stamp.ns <= time.monotonic_ns()
    assert [(s.phase, s.waits) for s in board.stamps()] == [
        (Phase.PROPOSE, False),
        (Phase.DISPATCH, False),
        (Phase.DISPATCH, True),
    ]


def test_exchanges_are_counted_anew_in_every_step(board):
    for step in (0, 1):
        for phase in (Phase.LAUNCH, Phase.DISPATCH, Phase.COMBINE, Phase.DISPATCH, Phase.COMBINE, Phase.SAMPLE):
            board.stamp(phase, step)
    assert [stamp.exchanges for stamp in board.stamps()] == [0, 1, 2, 3, 4, 4] * 2


def test_places_grow_in_the_order_of_the_program(board):
    """Two steps of two layers, waits included; the exchanges of two tracks may take turns in any order of layers."""
    for step in (0, 1):
        for phase in (Phase.BETWEEN, Phase.PROPOSE, Phase.VOTE, Phase.COMMIT, Phase.LAUNCH):
            board.stamp(phase, step)
            board.wait()
        for phase, layer in [(6, 0), (6, 0), (7, 0), (6, 1), (7, 0), (7, 1), (6, 1), (7, 1)]:
            board.stamp(phase, step, layer)
            board.wait()
        for phase in (Phase.SAMPLE, Phase.READ, Phase.MIGRATE):
            board.stamp(phase, step)
            board.wait()
    places = [stamp.place for stamp in board.stamps()]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


def test_the_ring_keeps_the_newest_stamps(board):
    for number in range(RECORDS + 10):
        board.stamp(Phase.READ, number)
    steps = [stamp.step for stamp in board.stamps()]
    assert steps == list(range(10, RECORDS + 10))


def test_a_stamp_that_was_overwritten_while_it_was_read_is_not_returned(board):
    board.stamp(Phase.READ, 0)
    assert board._read(0) is not None
    assert board._read(RECORDS) is None


def test_a_reader_never_sees_half_a_stamp(board, tmp_path):
    """Another process writes step and layer alike, as fast as it can."""
    program = tmp_path / "writer.py"
    program.write_text(
        "import sys\n"
        "from runtime.failure.board import Board\n"
        "board = Board.attach(int(sys.argv[1]))\n"
        "for number in range(400_000):\n"
        "    board.stamp(6, number % 60_000, number % 60_000)\n"
    )
    command = bare_script(program, str(board.descriptor))
    seen = set()
    with subprocess.Popen(command, pass_fds=[board.descriptor]) as writer:
        while writer.poll() is None:
            stamp = board.last_stamp()
            if stamp is not None:
                assert stamp.step == stamp.layer
                seen.add(stamp.number)
    assert writer.returncode == 0
    assert len(seen) > 10


def test_another_process_reads_and_writes_the_same_board(board, tmp_path):
    program = tmp_path / "pulse.py"
    program.write_text(
        "import sys\n"
        "from runtime.failure.board import Board\n"
        "from runtime.failure.verdict import Phase, Reason, Verdict\n"
        "board = Board.attach(int(sys.argv[1]))\n"
        "print(board.pid, board.rank, board.state.name, board.last_stamp()[2:5], board.error.cause)\n"
        "board.verdict = Verdict(culprit=1, reason=Reason.GONE, cause='is gone')\n"
        "assert 'torch' not in sys.modules\n"
    )
    board.state = State.READY
    board.stamp(Phase.VOTE, 9)
    board.raise_error(VERDICT, second_hand=False, trace="Traceback")
    said = subprocess.run(
        bare_script(program, str(board.descriptor)),
        pass_fds=[board.descriptor], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.split() == f"{os.getpid()} 2 READY (9, <Phase.VOTE: 3>, 0) {VERDICT.cause}".split()
    assert board.verdict == Verdict(culprit=1, reason=Reason.GONE, cause="is gone")


def test_only_the_first_error_counts_and_the_end_of_its_trace_is_kept(board):
    board.raise_error(VERDICT, second_hand=True, trace="x" * TRACE_BYTES + "the end")
    board.raise_error(Verdict(culprit=0, reason=Reason.RAISED, cause="later"), second_hand=False, trace="")
    assert board.error == VERDICT
    assert board.error_is_second_hand
    assert len(board.trace) == TRACE_BYTES
    assert board.trace.endswith("the end")


def test_a_prediction_is_kept_in_seconds(board):
    board.predicted_s = 0.0375
    assert board.predicted_s == pytest.approx(0.0375)


@pytest.mark.parametrize(
    "cause", ["", "boom", "line\nbreak\tand \x00", "\N{SNOWMAN}" * 1000, "e\N{COMBINING ACUTE ACCENT}" * 400]
)
def test_a_verdict_comes_back_as_it_was_in_one_line_of_bounded_length(cause):
    verdict = Verdict(culprit=319, reason=Reason.STUCK, cause=cause, step=2**40, phase=Phase.MIGRATE, layer=60)
    found = unpack_verdict(pack_verdict(verdict))
    assert found.cause == one_line(cause)
    assert "\n" not in found.cause
    assert len(found.cause.encode()) <= TEXT_BYTES
    assert (found.culprit, found.step, found.phase, found.layer) == (319, 2**40, Phase.MIGRATE, 60)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"step": 17, "phase": Phase.COMBINE, "layer": 2}, "rank 3 failed in step 17, combine of layer 2: boom"),
        ({"step": 17, "phase": Phase.VOTE}, "rank 3 failed in step 17, vote: boom"),
        ({"step": BEFORE_STEPS}, "rank 3 failed before its first step: boom"),
        ({"step": UNKNOWN_STEP}, "rank 3 failed: boom"),
    ],
)
def test_a_verdict_says_rank_step_phase_and_cause(place, words):
    assert str(Verdict(culprit=3, reason=Reason.RAISED, cause="boom", **place)) == words


def test_a_stamp_costs_less_than_two_microseconds(board):
    """The best of many rounds: a busy machine makes single ones slow."""
    cost = min(timeit.repeat(lambda: board.stamp(Phase.DISPATCH, 5, 3), number=1000, repeat=30)) / 1000
    assert cost < 2e-6


def test_a_stamp_is_a_plain_value():
    stamp = Stamp(0, 1, 2, Phase.DISPATCH, 3, 4, waits=False)
    assert stamp.place == (2, Phase.DISPATCH, 4, False)
