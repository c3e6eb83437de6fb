"""Where times come from: tables, tables of another model or device, or peaks; and what a group adds to them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep import ExchangeConfig, Topology
from ep.blueprint import Blueprint
from runtime.costs.costs import StepCosts, StepShape
from runtime.costs.device_costs import Group, read_device_costs
from runtime.costs.measured import MeasuredOperations
from runtime.costs.padding import padding_of
from runtime.costs.roofline import CostShape, RooflineOperations
from runtime.costs.scaled import ScaledOperations
from runtime.model.model_config import read_model_config
from runtime.scheduling.cadence import CadenceConfig
from runtime.settings.config import EngineConfig
from runtime.settings.cost_group import expected_imbalance, group_of

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
H200, H100, H800, CPU = (
    read_device_costs(PROFILES / "hardware" / f"{name}.toml") for name in ("h200", "h100", "h800", "cpu")
)
V3_MODEL, K2_MODEL = (read_model_config(PROFILES / "models" / f"{name}.json") for name in ("deepseek-v3", "kimi-k2"))
V3, K2 = CostShape.of(V3_MODEL), CostShape.of(K2_MODEL)


def step_ms(costs, shape: CostShape, group: Group, *, tokens: int = 128, tracks: int = 1) -> float:
    step = StepShape(decode_tokens=tokens, context_len=2048)
    return StepCosts(costs.operations(shape, group)).step_time([step], tracks=tracks).total_us / 1e3


def test_the_model_that_was_measured_gets_its_tables_as_they_are():
    operations = H200.operations(V3, Group(ranks=32, redundant=32, imbalance=1.1))
    assert operations == MeasuredOperations(tables=H200.tables, ranks=32, redundant=32, imbalance=1.1, node_size=8)
    assert H200.source(V3) == "tables of DeepSeek-V3 on NVIDIA H200 SXM"


def test_another_model_gets_them_by_the_ratio_of_the_bounds():
    group = Group(ranks=32)
    operations = H200.operations(K2, group)
    assert isinstance(operations, ScaledOperations)
    # half the heads and 384 experts: 12 a rank instead of 8, while weights are what takes the time
    assert operations.attention_us(64, 4096) < 0.75 * H200.operations(V3, group).attention_us(64, 4096)
    assert operations.experts_us(16, mean_tokens=16) == pytest.approx(
        1.45 * H200.operations(V3, group).experts_us(16, mean_tokens=16), rel=0.05
    )
    assert operations.exchange_us(128) == pytest.approx(H200.operations(V3, group).exchange_us(128), rel=0.02)
    assert operations.frame.moe_layers == 60
    assert H200.source(K2) == "tables of DeepSeek-V3 on NVIDIA H200 SXM, scaled by the ratio of the peaks"


def test_scaled_to_itself_nothing_changes():
    group = Group(ranks=32, node_size=8)
    measured = H200.operations(V3, group)
    bound = RooflineOperations(shape=V3, hardware=H200.hardware, ranks=32)
    scaled = ScaledOperations(measured=measured, there=bound, here=bound)
    for tokens in (1, 64, 300):
        assert scaled.attention_us(tokens, 2048) == pytest.approx(measured.attention_us(tokens, 2048))
        assert scaled.experts_us(tokens, mean_tokens=tokens) == pytest.approx(
            measured.experts_us(tokens, mean_tokens=tokens)
        )
        assert scaled.exchange_us(tokens) == pytest.approx(measured.exchange_us(tokens))
        assert scaled.dense_us(tokens) == pytest.approx(measured.dense_us(tokens))
    assert scaled.prefill_us(500) == pytest.approx(measured.prefill_us(500))


def test_a_slower_memory_takes_longer_where_weights_are_read_and_a_slower_link_in_the_node():
    group = Group(ranks=8)
    there, here = H200.operations(V3, group), H100.operations(V3, group)
    ratio = 4.8 / 3.35
    assert here.experts_us(16, mean_tokens=16) == pytest.approx(ratio * there.experts_us(16, mean_tokens=16))
    assert here.exchange_us(64) == pytest.approx(there.exchange_us(64))
    assert H800.operations(V3, group).exchange_us(64) == pytest.approx(450 / 200 * there.exchange_us(64))


def test_a_device_without_tables_has_its_peaks(tmp_path: Path):
    path = tmp_path / "bare.toml"
    text = (PROFILES / "hardware" / "h100.toml").read_text("utf-8")
    path.write_text("\n".join([line for line in text.splitlines() if not line.startswith("costs_like")]), "utf-8")
    bare = read_device_costs(path)
    assert isinstance(bare.operations(V3, Group(ranks=8)), RooflineOperations)
    assert bare.source(V3) == "peaks of NVIDIA H100 SXM; nothing was measured for this model"
    path.write_text(text.replace('"h200"', '"h2000"'), "utf-8")
    with pytest.raises(
        ValueError, match=r"costs_like is 'h2000'; it must be a device whose file lies beside, e.g. h200"
    ):
        read_device_costs(path)
    path.write_text(text.replace('"h200"', '"../h200"'), "utf-8")
    with pytest.raises(ValueError, match=r"costs_like is '../h200'; it must be a name in the same folder"):
        read_device_costs(path)


def test_larger_nodes_cost_less_and_rows_inside_one_cost_what_a_node_costs():
    sizes = [step_ms(H200, V3, Group(ranks=64, node_size=size)) for size in (1, 2, 4, 8, 16, 32, 64, 72)]
    assert all(left > right for left, right in itertools.pairwise(sizes[:-1]))
    assert sizes[-1] == sizes[-2]
    one_node = H200.operations(V3, Group(ranks=8, node_size=72)).exchange_us(128)
    assert one_node == H200.operations(V3, Group(ranks=8)).exchange_us(128)


@pytest.mark.parametrize("costs", [H200, H100, CPU], ids=["tables", "scaled", "peaks"])
@pytest.mark.parametrize("name", ["imbalance", "wire_imbalance", "padding"])
def test_what_is_uneven_or_empty_costs_time(costs, name: str):
    level, worse = Group(ranks=32), Group(ranks=32, **{name: 2.0})
    level_us, worse_us = (costs.operations(V3, group) for group in (level, worse))
    part = "experts" if name == "imbalance" else "exchange"
    if part == "experts":
        times = [each.experts_us(512, mean_tokens=512) for each in (level_us, worse_us)]
        assert worse_us.exchange_us(512) == level_us.exchange_us(512)
    else:
        times = [each.exchange_us(512) for each in (level_us, worse_us)]
        assert worse_us.experts_us(512, mean_tokens=512) == level_us.experts_us(512, mean_tokens=512)
    assert 1.4 * times[0] < times[1] <= 2.001 * times[0]
    with pytest.raises(ValueError, match=f"{name} is 0.9; it is max over mean and at least 1.0"):
        costs.operations(V3, replace(level, **{name: 0.9}))


def test_host_time_is_the_tables_own_unless_it_was_measured():
    assert H200.operations(V3, Group(ranks=8)).frame.host_us == 150.0
    assert H200.operations(V3, Group(ranks=8, host_us=2500)).frame.host_us == 2500
    assert step_ms(H200, V3, Group(ranks=8, host_us=2150)) == pytest.approx(step_ms(H200, V3, Group(ranks=8)) + 2.0)


def blueprint(ranks: int, *, exchange: str = "bounded", hierarchical: str = "off") -> Blueprint:
    config = ExchangeConfig(exchange=exchange, hierarchical=hierarchical)  # type: ignore[arg-type]
    topology = Topology(num_ranks=ranks, node_size=min(8, ranks))
    return Blueprint(topology=topology, num_slots=256, hidden=7168, top_k=8, dtype=torch.bfloat16, config=config)


def test_on_a_node_every_block_has_room_for_the_batch():
    """8 ranks: a token needs one given rank with chance 1 - C(224, 8) / C(256, 8) = 0.662."""
    assert padding_of(blueprint(8), tokens=128) == pytest.approx(1 / 0.6618, rel=1e-3)
    assert padding_of(blueprint(8, exchange="exact"), tokens=128) == 1.0
    assert padding_of(blueprint(8), tokens=0) == padding_of(blueprint(1), tokens=8) == 1.0


def test_blocks_of_few_rows_have_more_room_to_spare_and_by_node_they_are_larger():
    straight = [padding_of(blueprint(32), tokens=tokens) for tokens in (32, 128, 512)]
    by_node = [padding_of(blueprint(32, hierarchical="on"), tokens=tokens) for tokens in (32, 128, 512)]
    assert straight == sorted(straight, reverse=True)
    assert all(1 <= nodes < ranks for nodes, ranks in zip(by_node, straight, strict=True))


def test_a_configuration_becomes_the_group_it_makes():
    config = EngineConfig(model="", ranks=32, node_size=8, exchange=ExchangeConfig(exchange="exact", hierarchical="on"))
    assert group_of(config, V3_MODEL, tokens=64, imbalance=1.2) == Group(
        ranks=32, node_size=8, imbalance=1.2, wire_imbalance=1.2, hierarchical=True
    )
    bounded = replace(config, exchange=ExchangeConfig(exchange="bounded", hierarchical="off", combine="slots"))
    group = group_of(bounded, V3_MODEL, tokens=64)
    assert (group.rows_per, group.hierarchical, group.padding) == ("slots", False, padding_of(blueprint(32), tokens=64))
    assert expected_imbalance(config, V3_MODEL, tokens=128) > 2
    moving = replace(config, eplb=replace(config.eplb, enable_eplb=True, num_redundant_experts=32))
    assert expected_imbalance(moving, V3_MODEL, tokens=128) < 1.2


def test_ranks_with_a_latency_target_agree_wherever_the_devices_file_lies():
    """The digest of a configuration with a target: it needs a device, and only where its file lies may differ."""
    here, there = (
        EngineConfig(model="m", hardware=path, cadence=CadenceConfig(itl_target_ms=40)) for path in ("a.toml", "b.toml")
    )
    assert here.digest("model") == there.digest("model")
    assert EngineConfig(model="m").digest("model") != EngineConfig(model="m", hardware="a.toml").digest("model")
