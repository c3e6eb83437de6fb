"""The cost model against the published tables: calibrated decode times, the roofline, and the all-to-all it is fed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.costs.cost_tables import read_cost_tables
from runtime.costs.costs import ItlBudget, StepCosts, StepShape
from runtime.costs.measured import MeasuredOperations
from runtime.costs.roofline import CostShape, RooflineOperations
from runtime.costs.traffic import RowsPer, Traffic
from runtime.model.model_config import read_model_config
from runtime.weights.hardware import Hardware

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
TABLES = read_cost_tables(PROFILES / "hardware" / "h200.toml")
V3 = CostShape.of(read_model_config(PROFILES / "models" / "deepseek-v3.json"))
H200 = Hardware(
    name="H200",
    memory_bytes=139 << 30,
    bf16_flops=990e12,
    fp8_flops=1979e12,
    memory_bytes_per_s=4.8e12,
    link_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)

CALIBRATED = """
8   64 2048 581  69  39.1 66.9 |  8   64 4096  635  69  42.4 70.2 |  8  128 2048 668 112 46.9 69.1
8  128 4096 812 112  55.7 75.7 |  8  256 2048  894 203  66.0 79.9 |  8  256 4096 1133 203 80.6 97.3
16  64 2048 403 160  34.1 46.3 | 16   64 4096  457 160  37.4 49.6 | 16  128 2048 490 288 46.8 48.5
16 128 4096 634 288  55.6 55.1 | 16  256 2048  716 520  74.1 59.3 | 16  256 4096 955 520 88.7 76.7
32  64 2048 312 235  33.2 35.6 | 32   64 4096  366 235  36.4 38.9 | 32  128 2048 407 406 48.9 37.9
32 128 4096 551 406  57.6 44.5 | 32  256 2048  659 765  85.0 49.6 | 32  256 4096 898 765 99.5 67.0
64  64 2048 268 254  31.8 30.2 | 64   64 4096  322 254  35.0 33.4 | 64  128 2048 379 472 51.0 32.8
64 128 4096 523 472  59.8 39.4 | 64  256 2048  659 881  91.7 57.1 | 64  256 4096 898 881 106.3 63.8
"""
"""Ranks, tokens a rank, context | compute and exchange of a layer in us | step in ms with one track, with two."""

ROOFLINE = """
8   64 2048 42.5  36.9  9.9 293.6   7.4  14.3 24.3 43.1 23.1
8  256 4096 52.7 295.0 12.3 293.6  29.5  57.1 44.8 59.1 39.7
16 128 2048 42.5  73.8  9.9 146.8  75.9 146.8 29.7 28.4 16.8
16  256 2048 52.7 147.5 12.3 146.8 151.7 293.6 48.1 33.1 27.2
32  64 4096 42.5  73.8  9.9  73.4  56.9 110.1 22.2 19.9 12.6
32  256 2048 52.7 147.5 12.3  91.2 227.6 440.4 57.7 40.1 40.1
64 128 2048 42.5  73.8  9.9  45.6 132.8 256.9 33.5 23.6 23.6
64  256 4096 52.7 295.0 12.3  91.2 265.5 513.8 73.2 47.0 47.0
"""
"""Ranks, tokens a rank, context | projections, core, shared and router, routed, dispatch, combine of a layer in us |
step in ms with one track, with two, and with the exchange hidden completely."""


def entries(table: str) -> list[list[float]]:
    return [[float(cell) for cell in entry.split()] for line in table.strip().splitlines() for entry in line.split("|")]


def measured(ranks: int, **changes) -> StepCosts:
    return StepCosts(MeasuredOperations(tables=TABLES, ranks=ranks, **changes))


def roofline(ranks: int, rows_per: RowsPer = "experts") -> RooflineOperations:
    return RooflineOperations(shape=V3, hardware=H200, ranks=ranks, rows_per=rows_per)


@pytest.mark.parametrize("entry", entries(CALIBRATED))
def test_the_calibrated_table_is_met_within_a_tenth(entry: list[float]):
    ranks, tokens, context, compute_us, exchange_us, one_track_ms, two_tracks_ms = entry
    costs = measured(int(ranks), rows_per="experts")
    shapes = [StepShape(decode_tokens=int(tokens), context_len=context)]
    layer = costs.layer_time(shapes)
    assert layer.compute_us == pytest.approx(compute_us, rel=0.10)
    assert costs.step_time(shapes).total_us / 1e3 == pytest.approx(one_track_ms, rel=0.10)
    assert costs.step_time(shapes, tracks=2).total_us / 1e3 == pytest.approx(two_tracks_ms, rel=0.10)
    # On one node the table above was made with an older library: the measured times used here are 8 to 11% shorter.
    assert layer.exchange_us == pytest.approx(exchange_us, rel=0.11 if ranks == 8 else 0.01)


@pytest.mark.parametrize("entry", entries(ROOFLINE))
def test_the_roofline_table_is_met_within_its_rounding(entry: list[float]):
    ranks, tokens, context, projections, core, shared, routed, there, back, one_ms, two_ms, hidden_ms = entry
    operations = roofline(int(ranks))
    costs = StepCosts(operations)
    shapes = [StepShape(decode_tokens=int(tokens), context_len=context)]
    bare_us = operations.attention_us(tokens, 0)
    assert bare_us == pytest.approx(projections, rel=0.002)
    assert operations.attention_us(tokens, context) - bare_us == pytest.approx(core, rel=0.002)
    assert operations.experts_us(tokens, mean_tokens=tokens) == pytest.approx(shared + routed, rel=0.004)
    assert operations.exchange_us(tokens) == pytest.approx(there + back, rel=0.004)
    step = costs.step_time(shapes)
    assert step.total_us / 1e3 == pytest.approx(one_ms, rel=0.006)
    assert costs.step_time(shapes, tracks=2).total_us / 1e3 == pytest.approx(two_ms, rel=0.006)
    layer = costs.layer_time(shapes)
    exposed_us = 58 * max(layer.exchange_us - layer.compute_us, 0.0)
    assert (step.total_us - step.exchange_us + exposed_us) / 1e3 == pytest.approx(hidden_ms, rel=0.006)


def test_sizes_of_deepseek_v3_are_those_of_its_config():
    assert (V3.projections, V3.absorbed, V3.expert) == (170_328_064, 16_777_216, 44_040_192)
    assert (V3.moe_layers, V3.dense_layers, V3.shared_experts, V3.fp8) == (58, 3, 1, True)


def test_nothing_measured_beats_the_roofline():
    for ranks, tokens, context in itertools.product((8, 32, 64), (64, 128, 256), (1024, 4096, 16384)):
        shapes = [StepShape(decode_tokens=tokens, context_len=context)]
        bound = StepCosts(roofline(ranks)).step_time(shapes)
        found = measured(ranks, rows_per="experts").step_time(shapes)
        assert found.attention_us > bound.attention_us
        assert found.experts_us > bound.experts_us
        assert found.exchange_us > bound.exchange_us


@pytest.mark.parametrize(("position", "rate"), [(512, 7212), (1024, 6812), (2048, 6288)])
def test_prompts_are_computed_at_the_published_rates(position: int, rate: int):
    shape = StepShape(prefill_tokens=rate, prefill_position=position)
    step = measured(8).step_time([shape, StepShape()])
    assert step.prefill_us == pytest.approx(1e6, rel=1e-3)
    assert step.total_us == step.prefill_us + step.host_us


def test_a_step_lasts_as_long_as_its_slowest_rank_and_the_others_wait():
    costs = measured(8)
    light = StepShape(decode_tokens=32, context_len=1000)
    long = StepShape(decode_tokens=64, context_len=8000, prefill_tokens=1000)
    together = costs.step_time([light, long, StepShape()])
    assert together.attention_us == costs.step_time([long]).attention_us
    assert together.prefill_us == costs.step_time([long]).prefill_us
    assert together.exchange_us == costs.step_time([long]).exchange_us
    full, half = StepShape(decode_tokens=256), StepShape(decode_tokens=128)
    assert measured(32).step_time([full, half]).experts_us < measured(32).step_time([full]).experts_us
    waits = costs.waits_us([light, long, StepShape()])
    assert waits[1] == 0.0
    assert 0.0 < waits[0] < waits[2]
    assert waits[2] == pytest.approx(together.attention_us + together.prefill_us)


def test_an_idle_group_pays_the_host_only():
    for costs in (measured(8), StepCosts(roofline(8))):
        assert costs.step_time([StepShape()] * 8).total_us == costs.operations.frame.host_us


@pytest.mark.parametrize("rows_per", ["ranks", "slots", "experts"])
def test_one_rank_exchanges_nothing(rows_per: RowsPer):
    assert MeasuredOperations(tables=TABLES, ranks=1, rows_per=rows_per).exchange_us(128) == 0.0
    assert roofline(1, rows_per).exchange_us(128) == 0.0


def test_the_exchange_as_built_costs_less_than_a_row_for_each_expert():
    for ranks in (4, 8, 16, 24, 32, 64, 128):
        by_rank, by_slot, by_expert = (
            MeasuredOperations(tables=TABLES, ranks=ranks, rows_per=name).exchange_us(128)
            for name in ("ranks", "slots", "experts")
        )
        assert by_rank < by_slot < by_expert


@pytest.mark.parametrize(("ranks", "nodes_reached"), [(16, 1.00), (32, 2.71), (64, 4.63), (128, 6.12)])
def test_rows_by_node_are_the_published_numbers_of_nodes_reached(ranks: int, nodes_reached: float):
    traffic = Traffic(ranks=ranks, node_size=8, experts=256, top_k=8)
    assert traffic.node_rows == pytest.approx(nodes_reached, abs=0.006)


def test_by_node_the_network_costs_less_and_a_node_still_costs_what_it_did():
    for ranks in (16, 32, 64, 128):
        straight, by_node = (
            MeasuredOperations(tables=TABLES, ranks=ranks, rows_per="experts", hierarchical=through).exchange_us(128)
            for through in (False, True)
        )
        assert MeasuredOperations(tables=TABLES, ranks=8, rows_per="experts").exchange_us(128) < by_node < straight
    in_node = [
        MeasuredOperations(tables=TABLES, ranks=8, hierarchical=through).exchange_us(128) for through in (False, True)
    ]
    assert in_node[0] == in_node[1]
    # 16 ranks: a token's one row to the other node instead of four, 50 GB/s; then on to 8 ranks over the link
    peak = RooflineOperations(shape=V3, hardware=H200, ranks=16, hierarchical=True, rows_per="experts").exchange_us(128)
    row_bytes = 7168 + 4 * 56 + 16 + 14336
    chance = 1 - math.comb(128, 8) / math.comb(256, 8)
    expected = 128 * row_bytes * (chance / 50e9 + 8 / 16 * 7 * 2 / 450e9) * 1e6
    assert peak == pytest.approx(expected)


def test_sizes_between_measured_ones_lie_between_them():
    times = [
        MeasuredOperations(tables=TABLES, ranks=ranks).exchange_us(128) for ranks in (2, 4, 8, 12, 16, 24, 32, 64, 320)
    ]
    assert times == sorted(times)
    held = [MeasuredOperations(tables=TABLES, ranks=ranks).local_experts for ranks in (8, 24, 320)]
    assert held == [32, 11, 1]
    assert MeasuredOperations(tables=TABLES, ranks=32, redundant=32).local_experts == 9


shapes = st.builds(
    StepShape,
    decode_tokens=st.integers(0, 600),
    context_len=st.floats(0, 40_000),
    prefill_tokens=st.integers(0, 9000),
    prefill_position=st.floats(0, 30_000),
)


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.integers(1, 320),
    group=st.lists(shapes, min_size=1, max_size=6),
    more=st.integers(0, 100),
    tracks=st.sampled_from([1, 2]),
)
def test_more_work_never_takes_less_time(ranks: int, group: list[StepShape], more: int, tracks: int):
    larger = [
        StepShape(
            decode_tokens=shape.decode_tokens + more,
            context_len=shape.context_len + more,
            prefill_tokens=shape.prefill_tokens + more,
            prefill_position=shape.prefill_position + more,
        )
        for shape in group
    ]
    for costs in (measured(ranks), StepCosts(roofline(ranks, "ranks"))):
        assert costs.step_time(group, tracks=tracks).total_us <= costs.step_time(larger, tracks=tracks).total_us
        assert all(part >= 0.0 for part in costs.step_time(group, tracks=tracks))
        assert min(costs.waits_us(group)) == 0.0


def test_a_device_without_tables_links_and_fp8_has_a_roofline_too():
    cpu = Hardware(
        name="CPU",
        memory_bytes=1 << 34,
        bf16_flops=0.13e12,
        fp8_flops=0,
        memory_bytes_per_s=18e9,
        link_bytes_per_s=0,
        network_bytes_per_s=0,
    )
    costs = StepCosts(RooflineOperations(shape=V3, hardware=cpu, ranks=16))
    step = costs.step_time([StepShape(decode_tokens=1, context_len=10, prefill_tokens=1)])
    assert all(math.isfinite(part) for part in step)
    assert step.exchange_us > 0


@given(
    target_ms=st.floats(20, 500),
    decode_tokens=st.integers(1, 256),
    context=st.integers(0, 8000),
    start=st.integers(0, 30_000),
)
@settings(max_examples=60, deadline=None)
def test_the_budget_keeps_a_step_within_the_target_or_at_its_least(
    target_ms: float, decode_tokens: int, context: int, start: int
):
    costs = measured(32)
    budget = ItlBudget(costs=costs, target_ms=target_ms)
    allowed = budget.prefill_tokens(
        decode_tokens=decode_tokens, context_tokens=decode_tokens * context, prefill_start=start
    )
    step = StepShape(
        decode_tokens=decode_tokens,
        context_len=context,
        prefill_tokens=allowed,
        prefill_position=start + allowed / 2,
    )
    total_ms = costs.step_time([step]).total_us / 1e3
    assert allowed == budget.min_tokens or total_ms <= target_ms
    assert allowed == budget.min_tokens or total_ms > 0.85 * target_ms


def test_the_budget_of_a_target_below_the_bare_step_is_the_least():
    assert ItlBudget(costs=measured(8), target_ms=5.0).prefill_tokens(
        decode_tokens=64, context_tokens=64_000, prefill_start=0
    ) == 64  # fmt: skip
    assert measured(8).prefill_tokens_within(-1.0, start=0) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"ranks": 0}, "ranks is 0; it must be at least 1"), ({"ranks": 8, "imbalance": 0.5}, "imbalance is 0.5")],
)
def test_an_impossible_group_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        MeasuredOperations(tables=TABLES, **changes)


def test_imbalance_costs_what_the_fullest_rank_computes():
    level = MeasuredOperations(tables=TABLES, ranks=32).experts_us(128, mean_tokens=128)
    skewed = MeasuredOperations(tables=TABLES, ranks=32, imbalance=2.0)
    assert skewed.experts_us(128, mean_tokens=64) == level
    assert skewed.experts_us(128, mean_tokens=128) > level
