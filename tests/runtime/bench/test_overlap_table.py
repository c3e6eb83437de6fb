"""The predicted gains are those published for H200, and auto cuts a step exactly where that is the better choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo import DboConfig
from runtime.bench.overlap_table import CONTEXTS, RANKS, TOKENS, Cell, overlap_cells
from runtime.costs.cost_tables import read_cost_tables
from runtime.costs.costs import StepCosts, StepFrame, StepShape
from runtime.costs.measured import MeasuredOperations
from runtime.simulation.simulated_front import Arrival
from runtime.simulation.simulation import GroupConfig, Simulation

TABLES = read_cost_tables(Path(__file__).resolve().parents[3] / "profiles" / "hardware" / "h200.toml")

PUBLISHED = """
8  64 2048 39.1 66.9 |  8  64 4096 42.4 70.2 |  8 128 2048 46.9 69.1 |  8 128 4096  55.7 75.7
8 256 2048 66.0 79.9 |  8 256 4096 80.6 97.3 | 16  64 2048 34.1 46.3 | 16  64 4096  37.4 49.6
16 128 2048 46.8 48.5 | 16 128 4096 55.6 55.1 | 16 256 2048 74.1 59.3 | 16 256 4096  88.7 76.7
32  64 2048 33.2 35.6 | 32  64 4096 36.4 38.9 | 32 128 2048 48.9 37.9 | 32 128 4096  57.6 44.5
32 256 2048 85.0 49.6 | 32 256 4096 99.5 67.0 | 64  64 2048 31.8 30.2 | 64  64 4096  35.0 33.4
64 128 2048 51.0 32.8 | 64 128 4096 59.8 39.4 | 64 256 2048 91.7 57.1 | 64 256 4096 106.3 63.8
"""
"""Ranks, tokens a rank, context, milliseconds of a step in one track and in two, from measured H200 kernel times."""


def published() -> dict[tuple[int, int, int], float]:
    """Gain by ranks, tokens and context."""
    entries = [entry.split() for line in PUBLISHED.strip().splitlines() for entry in line.split("|")]
    return {tuple(map(int, entry[:3])): float(entry[3]) / float(entry[4]) - 1.0 for entry in entries}


def cells(rows_per: str, *, comm_share: float = 0.0) -> list[Cell]:
    return overlap_cells(TABLES, DboConfig(), comm_share=comm_share, rows_per=rows_per)  # type: ignore[arg-type]


def test_gains_are_within_ten_points_of_the_published_ones():
    truth, compared = published(), 0
    for cell in cells("experts"):
        key = (cell.ranks, cell.tokens, cell.context_len)
        if key in truth:
            assert abs(cell.gain - truth[key]) <= 0.10, f"{cell}: published {truth[key]:+.0%}"
            compared += 1
    assert compared == len(truth) == 24


@pytest.mark.parametrize("rows_per", ["experts", "ranks"])
@pytest.mark.parametrize("comm_share", [0.0, 20 / 132])
def test_auto_is_the_better_of_on_and_off_in_every_cell(rows_per: str, comm_share: float):
    table = cells(rows_per, comm_share=comm_share)
    assert len(table) == len(RANKS) * len(TOKENS) * len(CONTEXTS) == 32
    assert [cell for cell in table if cell.is_cut != (cell.cut_ms < cell.one_ms)] == []
    assert {cell.is_cut for cell in table} == {True, False}


def test_multiprocessors_for_exchanges_cost_cut_steps_only():
    free, taken = cells("experts"), cells("experts", comm_share=0.2)
    assert all(left.one_ms == right.one_ms for left, right in zip(free, taken, strict=True))
    assert all(left.cut_ms <= right.cut_ms for left, right in zip(free, taken, strict=True))
    assert any(left.cut_ms < right.cut_ms for left, right in zip(free, taken, strict=True))


@pytest.mark.parametrize(("compute_us", "exchange_us", "share", "layer_us"), [
    (100, 50, 0.0, 100), (100, 50, 0.2, 110), (100, 400, 0.2, 400), (100, 100, 0.5, 150)
])  # fmt: skip
def test_a_layer_is_as_long_as_compute_on_what_is_left_or_as_the_exchange(compute_us, exchange_us, share, layer_us):
    class Operations:
        """Half as much takes half as long."""

        frame = StepFrame(moe_layers=1, dense_layers=0, head_us=0.0, host_us=0.0)

        def attention_us(self, tokens: float, context_len: float) -> float:
            return compute_us * tokens / 2

        def experts_us(self, tokens: float, *, mean_tokens: float) -> float:
            return 0.0

        def exchange_us(self, tokens: float) -> float:
            return exchange_us * tokens / 2

        def dense_us(self, tokens: float) -> float:
            return 0.0

        def prefill_us(self, position: float) -> float:
            return 1.0

    costs = StepCosts(Operations(), comm_share=share)
    assert costs.step_time([StepShape(decode_tokens=2)], tracks=2).total_us == pytest.approx(layer_us)


@pytest.mark.parametrize(("ranks", "tokens"), [(8, 64), (32, 128)])
def test_a_simulated_group_on_auto_is_as_fast_as_the_better_of_on_and_off(ranks: int, tokens: int):
    costs = StepCosts(MeasuredOperations(tables=TABLES, ranks=ranks, rows_per="experts"))
    arrivals = [
        Arrival(at_us=0.0, prompt_len=8, max_tokens=30, rank=rank) for rank in range(ranks) for _ in range(tokens)
    ]
    runs = {
        dbo: Simulation(GroupConfig(ranks=ranks, overlap=DboConfig(dbo=dbo)), costs, arrivals).run()
        for dbo in ("off", "on", "auto")
    }
    assert runs["off"].cut_steps == 0
    assert runs["on"].cut_steps >= 28
    assert runs["auto"].end_us <= 1.05 * min(runs["off"].end_us, runs["on"].end_us)
    assert abs(runs["off"].end_us / runs["on"].end_us - 1.0) > 0.1
