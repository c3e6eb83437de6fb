import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from launch.command.report import (
    LONG_LOAD,
    error_line,
    exchange_line,
    graph_line,
    loading_bar,
    overflow_line,
    overlap_line,
    rank_table,
)
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


def group(size: int, change: Callable[[int], dict[str, Any]]) -> EngineStats:
    """Ranks that have done nothing, but for what `change` says of each."""
    counts = dict.fromkeys(
        ["steps", "idle_steps", "computed_tokens", "generated_tokens", "finished", "preemptions", "prefix_queries",
         "prefix_hits", "num_pages", "free_pages", "running", "waiting", "slow_steps", "overflow_steps", "rerun_steps",
         "cut_steps"], 0
    )  # fmt: skip
    words = {**counts, "degraded": False, "expert_balance": 1.0, "uncut_steps": ""}
    return EngineStats(ranks=tuple(RankStats(rank=rank, **{**words, **change(rank)}) for rank in range(size)))


def test_overflows_are_told_by_rank_where_there_were_any():
    assert overflow_line(group(3, lambda _: {})) is None
    counts = [4, 0, 1]
    assert overflow_line(group(3, lambda rank: {"overflow_steps": counts[rank], "rerun_steps": 6})) == (
        "rows did not fit the exchange in some steps (4 on rank 0, 1 on rank 2); 6 steps were run again, exact"
    )
    once = overflow_line(group(1, lambda _: {"overflow_steps": 1, "rerun_steps": 1}))
    assert once == "rows did not fit the exchange in some steps (1 on rank 0); 1 step was run again, exact"


def test_the_table_marks_a_rank_that_gets_no_new_requests():
    stats = group(2, lambda rank: {"slow_steps": 7 * rank, "degraded": rank == 1})
    said = io.StringIO()
    Console(file=said, width=100).print(rank_table(stats))
    rows = [line.split() for line in said.getvalue().splitlines() if line.strip()[:1].isdigit()]
    assert [row[10:] for row in rows] == [["0"], ["7", "DEGRADED"]]


def test_what_the_exchange_sends_is_told_for_the_rank_that_sends_most():
    assert exchange_line(group(2, lambda _: {"steps": 4})) is None
    mib = 2**20
    sent = group(2, lambda rank: {"steps": 4, "network_bytes": 8 * mib * rank, "node_bytes": mib})
    assert exchange_line(sent) == "exchange, a step and rank: 2.00 MiB to other nodes, 0.25 MiB inside the node"


def test_replayed_steps_are_told_of_the_rank_that_replays_least_where_any_can_be():
    assert graph_line(group(2, lambda _: {"steps": 9})) is None
    assert graph_line(group(1, lambda _: {"steps": 9, "replayed_steps": 9})) == "9 of 9 steps were replayed as graphs"
    words = ["", "2 run again exactly"]
    told = graph_line(group(2, lambda r: {"steps": 9, "replayed_steps": 9 - 2 * r, "launched_steps": words[r]}))
    assert told == "7 of 9 steps were replayed as graphs; kernel by kernel: 2 run again exactly"


def test_cut_steps_are_told_where_overlap_is_not_off():
    assert overlap_line(group(2, lambda _: {})) is None
    assert overlap_line(group(2, lambda _: {"steps": 9, "cut_steps": 9})) == "9 of 9 steps ran in several tracks"
    told = overlap_line(group(2, lambda _: {"steps": 9, "cut_steps": 2, "uncut_steps": "7 below the decode threshold"}))
    assert told == "2 of 9 steps ran in several tracks; whole: 7 below the decode threshold"
