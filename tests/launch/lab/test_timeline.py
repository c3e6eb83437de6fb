"""Pictures by hand: three ranks, a few steps, and what each does in each column."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from launch.lab.timeline import Picture
from runtime.scheduling.cadence import Reason
from runtime.simulation.simulation_record import Run, StepRecord, Tokens, Window


def step(
    number: int, begin_ms: float, end_ms: float, busy_ms: Sequence[float], prompt_ms: Sequence[float]
) -> StepRecord:
    """A rank that is busy decodes one token; prompt_ms are part of busy_ms."""
    return StepRecord(
        number,
        1e3 * begin_ms,
        1e3 * end_ms,
        Reason.OFF,
        tuple(int(busy > 0) for busy in busy_ms),
        tuple(int(prompt > 0) for prompt in prompt_ms),
        tuple(1e3 * busy for busy in busy_ms),
        tuple(1e3 * prompt for prompt in prompt_ms),
    )


STEPS = (
    step(7, 0, 40, [40, 40, 0], [0, 0, 0]),
    step(8, 40, 240, [200, 40, 0], [160, 0, 0]),
    step(9, 320, 360, [40, 40, 0], [0, 0, 0]),
    step(10, 360, 400, [40, 10, 40], [0, 0, 30]),
)


def run_of(steps: Sequence[StepRecord], ranks: int = 3) -> Run:
    return Run(
        ranks=ranks,
        seed=0,
        steps=steps,
        stories=[],
        tokens=Tokens(),
        waves=1,
        longest_put_off=0,
        end_us=0.0,
        verdict=None,
    )


def test_a_column_is_a_slice_of_time_prompts_first_then_decoding_then_waiting():
    picture = Picture(steps=STEPS, slice_us=40e3)
    assert [picture.row(rank) for rank in range(3)] == [
        "d####d  dd",
        "dd....  dd",
        "......  .#",
    ]


def test_a_short_step_has_a_column_too_and_work_in_it_is_seen():
    picture = Picture(steps=STEPS, slice_us=100e3)
    assert [picture.row(rank) for rank in range(3)] == ["d## dd", "dd. dd", "... .#"]
    assert picture.columns == 6


def test_lines_have_step_numbers_lengths_and_who_waits_how_long():
    lines = [line.plain for line in Picture(steps=STEPS, slice_us=40e3).lines(3)]
    assert lines == [
        "step      7       9",
        "rank 0    d####d  dd waits   0%",
        "rank 1    dd....  dd waits  59%",
        "rank 2    ......  .# waits  88%",
        "ms        40      40",
        "# computes prompts   d decodes   . waits for others   (a column: 40 ms, or a step)",
    ]


def test_the_rank_that_failed_is_marked_and_the_others_wait_for_it():
    lines = [line.plain for line in Picture(steps=STEPS, slice_us=40e3).lines(3, failed=1)]
    assert [line.split()[-3][-5:] for line in lines[1:4]] == [".....", "xxxxx", "....."]
    assert "x failed" in lines[-1]


def test_time_is_cut_as_finely_as_the_columns_allow_and_what_does_not_fit_is_left_out():
    run = run_of(STEPS)
    assert Picture.of(run, Window(), columns=80).slice_us == 5e3
    assert Picture.of(run, Window(), columns=20).slice_us == 20e3
    assert Picture.of(run, Window(), columns=10).slice_us == 40e3
    assert len(Picture.of(run, Window(), columns=3).steps) == 3
    assert len(Picture.of(run, Window(begin_us=300e3), columns=80).steps) == 2
    assert Picture.of(run, Window(begin_us=1e9), columns=80).columns == 0


def test_a_picture_without_steps_has_empty_lines():
    lines = [line.plain for line in Picture(steps=(), slice_us=5e3).lines(1)]
    assert lines[1] == "rank 0     waits   0%"


def test_of_many_ranks_those_with_prompts_are_shown():
    busy = [10.0] * 40
    prompts = [10.0 if rank in (3, 39) else 0.0 for rank in range(40)]
    lines = [line.plain for line in Picture(steps=(step(1, 0, 10, busy, prompts),), slice_us=5e3).lines(40, failed=25)]
    shown = [int(line.split()[1]) for line in lines if line.startswith("rank ")]
    assert len(shown) == 16
    assert {3, 25, 39} <= set(shown)
    assert shown == sorted(shown)
    assert "and 24 more ranks" in lines


def test_colours_change_no_glyph():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=100)
    for line in Picture(steps=STEPS, slice_us=40e3).lines(3):
        console.print(line)
    assert "\x1b[" in out.getvalue()
    plain = io.StringIO()
    for line in Picture(steps=STEPS, slice_us=40e3).lines(3):
        Console(file=plain, width=100).print(line)
    assert "\x1b[" not in plain.getvalue()
    assert "rank 0    d####d  dd waits   0%" in plain.getvalue()
