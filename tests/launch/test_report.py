import io

import pytest
from rich.console import Console

from launch.report import LONG_LOAD, error_line, loading_bar, rank_table
from runtime import EngineStats, RankStats


@pytest.mark.parametrize(
    ("terminal", "total", "drawn"), [(True, LONG_LOAD, True), (True, LONG_LOAD - 1, False), (False, LONG_LOAD, False)]
)
def test_a_bar_is_drawn_for_a_long_load_on_a_terminal_only(terminal, total, drawn):
    said = io.StringIO()
    with loading_bar(Console(file=said, force_terminal=terminal, width=100)) as progress:
        progress(0, total)
        progress(total // 2, total)
    assert ("loading weights" in said.getvalue()) == drawn
    assert ("0.5/1.0 GiB" in said.getvalue()) == drawn
    if not terminal:
        assert said.getvalue() == ""


def test_a_bar_is_gone_when_the_load_ends_by_an_error():
    said = io.StringIO()
    with pytest.raises(ValueError, match="cut off"), loading_bar(Console(file=said, force_terminal=True)) as progress:  # noqa: PT012
        progress(1, LONG_LOAD)
        raise ValueError("cut off")
    after_bar = said.getvalue().rpartition("loading weights")[2]
    assert "\x1b[2K" in after_bar


def test_how_many_requests_ended_in_an_error_and_what_that_means_is_one_sentence():
    meaning = (
        "ended in an error: no usable logits, they were NaN or infinite; the weights or the number format (--dtype) "
        "do not fit"
    )
    assert error_line(2, 3) == f"2 of 3 requests {meaning}"
    assert error_line(1, 1) == f"1 of 1 request {meaning}"


def test_the_table_marks_a_rank_that_gets_no_new_requests():
    counts = dict.fromkeys(
        ["steps", "idle_steps", "computed_tokens", "generated_tokens", "finished", "preemptions", "prefix_queries",
         "prefix_hits", "num_pages", "free_pages", "running", "waiting"], 0
    )  # fmt: skip
    ranks = [
        RankStats(rank=rank, slow_steps=7 * rank, degraded=rank == 1, expert_balance=1.0, **counts) for rank in range(2)
    ]
    said = io.StringIO()
    Console(file=said, width=100).print(rank_table(EngineStats(ranks=tuple(ranks))))
    rows = [line.split() for line in said.getvalue().splitlines() if line.strip()[:1].isdigit()]
    assert [row[10:] for row in rows] == [["0"], ["7", "DEGRADED"]]
