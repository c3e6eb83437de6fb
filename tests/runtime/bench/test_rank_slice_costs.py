"""What is made of a slice's times is arithmetic that a hand can follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep import ExchangeBytes
from runtime.bench.rank_slice import SliceTimes
from runtime.bench.rank_slice_costs import (
    LayerTimes,
    Work,
    compute_times,
    fitting_tables,
    published_us,
    roofs_us,
    stage_times,
    table_wire_us,
    throughput,
    wire_us,
)
from runtime.bench.stages import HEAD, LAYER_BEGINS, PROJECTIONS, REST, STAND_IN, Interval
from runtime.costs.cost_tables import read_cost_tables
from runtime.costs.roofline import CostShape
from runtime.model.model_config import read_model_config
from runtime.weights.hardware import read_hardware

H200 = read_hardware("profiles/hardware/h200.toml")
TABLES = read_cost_tables("profiles/hardware/h200.toml")
V3 = CostShape.of(read_model_config("profiles/models/deepseek-v3.json"))
WORK = Work(shape=V3, batch=128, context=2048, pairs=1024, slots=8, ranks=32, row_bytes=7520)


def test_roofs_are_those_of_the_published_accounting():
    """H200, V3, EP32, 128 tokens at 2k: core 73.8 us, projections and absorption 42.5, routed experts 73.4."""
    roofs = roofs_us(WORK, H200)
    assert roofs[PROJECTIONS] == pytest.approx(35.5, abs=0.2)
    assert roofs["attention core"] == pytest.approx(73.8 + 4.4, abs=0.6)
    assert roofs["routed experts"] == pytest.approx(73.4, abs=0.2)
    assert roofs["shared expert"] == pytest.approx(9.2, abs=0.1)
    assert roofs[HEAD] == pytest.approx(386, abs=1)


def test_bf16_experts_take_twice_the_bytes():
    half = roofs_us(replace(WORK, shape=replace(V3, fp8=False)), H200)
    assert half["routed experts"] == pytest.approx(2 * roofs_us(WORK, H200)["routed experts"])


def test_published_times_are_those_of_the_tables():
    published = published_us(WORK, TABLES)
    assert published["attention core"] == 147.0
    assert published["routed experts"] == 124.0
    assert published_us(WORK, None) == {}
    assert table_wire_us(TABLES, ranks=32, batch=128) == 143.0 + 263.0


def test_tables_of_another_model_are_left_aside():
    assert fitting_tables(TABLES, V3) is TABLES
    assert fitting_tables(TABLES, replace(V3, experts=384)) is None
    assert fitting_tables(None, V3) is None


def intervals(dense: float, moe: tuple[float, ...], wire: float) -> tuple[Interval, ...]:
    """Before the first layer 1 us, then layers, the last without the next one's projections, then the head, 10 us."""
    found = [Interval(REST, -1, 1.0), Interval(LAYER_BEGINS, 0, dense)]
    for layer, us in enumerate(moe, 1):
        found += [
            Interval(LAYER_BEGINS, layer, us - 2.0),
            Interval("routed experts", layer, 2.0),
            Interval(STAND_IN, layer, wire),
        ]
    return (*found, Interval(HEAD, len(moe), 10.0))


def times(parts: tuple[Interval, ...], step_us: float | None = None) -> SliceTimes:
    whole = sum(each.us for each in parts) if step_us is None else step_us
    return SliceTimes(batch=8, step_us=whole, spread_us=0.0, intervals=parts, sent=ExchangeBytes(0, 0))


def test_layers_that_were_not_built_count_as_those_that_were():
    parts = intervals(5.0, (20.0, 20.0, 19.0), wire=7.0)
    built = compute_times(times(parts), built=(1, 3), whole=(1, 3))
    assert (built.dense_us, built.moe_us) == (5.0, 20.0)
    assert built.step_us == pytest.approx(1 + 5 + 20 + 20 + 19 + 10)  # what stands in for the wire is left out
    more = compute_times(times(parts), built=(1, 3), whole=(3, 58))
    assert more.step_us == pytest.approx(built.step_us + 2 * 5 + 55 * 20)


def test_marks_that_cost_time_are_taken_out():
    parts = intervals(5.0, (20.0, 20.0), wire=0.0)
    marked = sum(each.us for each in parts)
    assert compute_times(times(parts, marked / 2), built=(1, 2), whole=(1, 2)).step_us == pytest.approx(marked / 2)
    assert compute_times(times(parts, marked / 2), built=(1, 2), whole=(1, 2)).moe_us == pytest.approx(10.0)


def test_stages_are_those_of_a_layer_that_was_measured_whole():
    found = stage_times(intervals(5.0, (20.0, 30.0, 40.0), wire=7.0), built=(1, 3))
    assert found == {LAYER_BEGINS: 23.0, "routed experts": 2.0, STAND_IN: 7.0, HEAD: 10.0, REST: 1.0}


def test_the_wire_takes_the_slower_link_or_both_in_turn():
    sent = ExchangeBytes(network=50_000_000, node=45_000_000)
    flat = wire_us(sent, H200, moe_layers=10, hierarchical=False)
    assert flat == pytest.approx(100.0)
    assert wire_us(sent, H200, moe_layers=10, hierarchical=True) == pytest.approx(110.0)


def test_two_tracks_hide_the_wire_or_their_compute():
    full, half = LayerTimes(moe_us=100, dense_us=0, step_us=1000), LayerTimes(moe_us=60, dense_us=0, step_us=0)
    common = {"batch": 10, "moe_layers": 10, "full": full, "half": half}
    hidden = throughput("a", wire_us=80, half_wire_us=40, **common)  # type: ignore[arg-type]
    assert hidden.in_turns_us == 1800
    assert hidden.overlapped_us == 1200  # two halves of 60 a layer
    exposed = throughput("b", wire_us=200, half_wire_us=100, comm_share=0.5, **common)  # type: ignore[arg-type]
    assert exposed.overlapped_us == 1000 + 10 * (120 + 0.5 * 200 - 100)
    assert exposed.in_turns == pytest.approx(10 / 3000e-6)
    assert throughput("c", wire_us=1, batch=1, moe_layers=1, full=full).overlapped is None
