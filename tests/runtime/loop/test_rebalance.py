"""Experts change places while requests decode, every few steps, at random: not a token and not a log-probability moves.

The truth is one rank whose experts stay where they are. Three faults are planted that must not pass unseen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moe.experts
import runtime.loop.rebalance
from eplb.config import EplbConfig
from eplb.migration import ExpertLayer, LayerTransfer
from eplb.recording import RoutingRecorder
from moe import ExpertBank, spread
from runtime import Engine, EngineConfig, RequestOutput
from runtime.loop.routing_record import read_routing
from runtime.model.model_config import read_model_config
from runtime.requests.telemetry import EngineStats
from runtime.settings.settling import Settled, settle
from tests.runtime.mixes import SMALL_V3, Ask, Settings, engine_config
from tests.runtime.rebalancing import RESTLESS, random_planner
from tests.runtime.test_invariance import assert_same, mixed_asks

BASE = Settings(num_blocks=200, block_size=16, enable_prefix_caching=True, async_depth=1, max_num_seqs=4)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.loop.rebalance, "planner_of", random_planner)


def run_asks(config: EngineConfig, asks: list[Ask]) -> tuple[list[RequestOutput], EngineStats]:
    with Engine(config) as engine:
        for index, ask in enumerate(asks):
            engine.submit(ask.prompt, ask.params, request_id=str(index), priority=ask.priority)
        outputs = {output.request_id: output for output in engine.run()}
        stats = engine.stats()
    assert all(rank.free_pages == rank.num_pages for rank in stats.ranks)
    return [outputs[str(index)] for index in range(len(asks))], stats


def moving(model: Path, *, ranks: int, redundant: int = 0, **settings: Any) -> EngineConfig:
    config = engine_config(model, replace(BASE, ranks=ranks, **settings))
    return replace(config, eplb=replace(RESTLESS, num_redundant_experts=redundant))


@pytest.mark.parametrize(
    ("ranks", "redundant", "settings"),
    [
        (2, 0, {}),
        (2, 16, {"async_depth": 0}),
        (3, 5, {"combine": "slots"}),
        (4, 12, {"round_tokens": 3, "tracks": 2}),
        (4, 48, {"max_num_batched_tokens": 16}),
        (8, 16, {}),
    ],
)
def test_rebalances_at_random_change_no_answer(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], restless: None, ranks: int, redundant: int, settings: Any
):
    asks = mixed_asks(ranks + redundant, 9)
    outputs, stats = run_asks(moving(small_v3, ranks=ranks, redundant=redundant, **settings), asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert_same(output, alone(ask))
    counts = [(rank.experts.rebalances, rank.experts.dropped, rank.experts.bytes_moved) for rank in stats.ranks]
    assert len(set(counts)) == 1
    assert counts[0][0] >= 2, counts
    assert counts[0][1] == 0


def test_experts_of_a_preempted_and_resumed_engine_go_on_moving(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], restless: None
):
    """Few pages, several waves: the migration that one wave leaves unfinished goes on in the next."""
    config = moving(small_v3, ranks=2, redundant=8, block_size=4, num_blocks=24)
    asks = [replace(ask, prompt=ask.prompt[:30], params=replace(ask.params, max_tokens=9)) for ask in mixed_asks(4, 8)]
    with Engine(config) as engine:
        for ask in asks:
            name = engine.submit(ask.prompt, ask.params)
            outputs = {output.request_id: output for output in engine.run()}
            assert_same(outputs[name], alone(ask))
        assert engine.stats().ranks[0].experts.rebalances >= 2
        assert any("experts rebalanced" in line for line in engine.notices)


# The smallest fp8 bank there is: its scales are kept beside it, on the CPU too.
@pytest.fixture(scope="session")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-fp8")
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(SMALL_V3 | {"quantization_config": quantization}))
    return folder


@pytest.fixture
def kept_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settled, "keep_fp8", True)


def alone_in(model: Path, asks: list[Ask]) -> list[RequestOutput]:
    """One rank, nothing moves."""
    return run_asks(engine_config(model, BASE), asks)[0]


def find_difference(outputs: list[RequestOutput], truth: list[RequestOutput]) -> str:
    """What is different, in the words of the check that every other test makes; empty when nothing is."""
    try:
        for output, expected in zip(outputs, truth, strict=True):
            assert_same(output, expected)
    except AssertionError as difference:
        return str(difference)
    return ""


def difference_in_fp8(model: Path) -> str:
    asks = mixed_asks(3, 6)
    outputs, stats = run_asks(moving(model, ranks=3, redundant=8), asks)
    assert stats.ranks[0].experts.rebalances >= 1
    return find_difference(outputs, alone_in(model, asks))


def test_experts_in_fp8_move_with_their_scales(fp8_model: Path, kept_fp8: None, restless: None):
    assert not difference_in_fp8(fp8_model)


def test_a_scale_that_stays_behind_is_seen(
    fp8_model: Path, kept_fp8: None, restless: None, monkeypatch: pytest.MonkeyPatch
):
    def without_scales(bank: ExpertBank) -> list[torch.Tensor]:
        return [bank.gate_up_L2FD, bank.down_LDF]

    monkeypatch.setattr(moe.experts, "_tensors", without_scales)
    assert difference_in_fp8(fp8_model)


def difference_in_small(model: Path, alone: Callable[[Ask], RequestOutput]) -> str:
    asks = mixed_asks(5, 6)
    outputs, _ = run_asks(moving(model, ranks=3, redundant=8), asks)
    return find_difference(outputs, [alone(ask) for ask in asks])


def test_a_map_that_one_rank_does_not_switch_is_seen(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], restless: None, monkeypatch: pytest.MonkeyPatch
):
    assert not difference_in_small(small_v3, alone)
    plain = runtime.loop.rebalance.expert_layer

    def forgetful(bank: ExpertBank, table: Any, *, rank: int, node_size: int) -> ExpertLayer:
        layer = plain(bank, table, rank=rank, node_size=node_size)
        return replace(layer, show=lambda placement: None) if rank == 1 else layer

    monkeypatch.setattr(runtime.loop.rebalance, "expert_layer", forgetful)
    assert difference_in_small(small_v3, alone)


def test_a_slot_that_is_written_before_the_map_switches_is_seen(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], restless: None, monkeypatch: pytest.MonkeyPatch
):
    """Arrivals go into their slots at once, and not when all ranks have theirs."""
    plain = LayerTransfer.beat

    def hasty(self: LayerTransfer, *, step: int) -> None:
        plain(self, step=step)
        for slot, index in self.moves.writes:
            haul = self.moves.hauls[index]
            if haul.rank == self._transport.rank:
                self._layer.bank.write_blob(slot % self.moves.new.slots_per_rank, self._staged(haul.place))

    monkeypatch.setattr(LayerTransfer, "beat", hasty)
    assert difference_in_small(small_v3, alone)


def test_copies_from_the_checkpoint_change_no_answer_either(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], restless: None, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    plain = runtime.loop.rebalance.checkpoint_fetch

    def counting(*args: Any) -> Any:
        fetch = plain(*args)

        def count(layer: int, expert: int, out_B: torch.Tensor) -> None:
            asked.append(expert)
            fetch(layer, expert, out_B)

        return count

    monkeypatch.setattr(runtime.loop.rebalance, "checkpoint_fetch", counting)
    config = moving(small_v3, ranks=2, redundant=8)
    config = replace(config, eplb=replace(config.eplb, eplb_checkpoint_gbps=10.0, eplb_wire_gbps=15.0))
    asks = mixed_asks(7, 6)
    outputs, stats = run_asks(config, asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert_same(output, alone(ask))
    assert stats.ranks[0].experts.rebalances >= 2
    assert 0 < len(asked) < stats.ranks[0].experts.experts_moved, "some come from there, some from ranks"


def test_the_serried_policy_moves_experts_by_itself_and_changes_no_answer(
    small_v3: Path, alone: Callable[[Ask], RequestOutput]
):
    config = engine_config(small_v3, replace(BASE, ranks=4))
    eplb = EplbConfig(enable_eplb=True, num_redundant_experts=4, eplb_window=6, eplb_interval=8, eplb_min_gain=0.01)
    asks = mixed_asks(11, 9)
    outputs, stats = run_asks(replace(config, eplb=eplb), asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert_same(output, alone(ask))
    experts = stats.ranks[0].experts
    assert experts.rebalances >= 1
    assert len(experts.balance) == len(experts.balance_before) == len(experts.balance_after) == 2
    assert sum(experts.balance_after) > sum(experts.balance_before)


@pytest.mark.parametrize("redundant", [0, 5])
def test_the_plan_of_memory_counts_copies_and_the_pool_to_the_byte(small_v3: Path, redundant: int):
    config = moving(small_v3, ranks=3, redundant=redundant)
    still = replace(config, eplb=EplbConfig(enable_eplb=False))
    with Engine(config) as engine:
        [worker, *_] = engine._ranks.workers  # type: ignore[attr-defined]
        weights = worker.decoder.weights
        banks = [layer.moe.bank for layer in weights.layers if layer.moe is not None]
        plan = engine.plan
        assert plan.weights.experts == sum(bank.num_slots * bank.blob_bytes for bank in banks)
        assert plan.workspaces.migration == worker.experts.rebalancer._pool.num_bytes
    without = settle(still).plan
    assert without.workspaces.migration == 0
    assert plan.workspaces.total - without.workspaces.total == plan.workspaces.migration > 0


def test_copies_that_no_rank_could_use_are_refused(small_v3: Path):
    with pytest.raises(ValueError, match=r"num_redundant_experts 17 must be from 0 to 16: on 2 ranks"):
        settle(moving(small_v3, ranks=2, redundant=17))


def test_a_model_without_experts_is_refused(tmp_path: Path):
    dense = SMALL_V3 | {"first_k_dense_replace": SMALL_V3["num_hidden_layers"]}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    if read_model_config(tmp_path).moe is not None and read_model_config(tmp_path).moe_layers:
        pytest.fail("the model is not dense")
    with pytest.raises(ValueError, match="enable_eplb is True; the model has no routed experts"):
        settle(moving(tmp_path, ranks=1))


def test_what_is_recorded_places_experts_at_the_next_start_and_changes_no_answer(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], tmp_path: Path
):
    asks = mixed_asks(13, 8)
    base = engine_config(small_v3, replace(BASE, ranks=3))
    name = str(tmp_path / "routing")
    _, stats = run_asks(replace(base, eplb=EplbConfig(record_routing=name)), asks)
    recording = read_routing(name)
    assert (recording.num_ranks, recording.num_layers, recording.top_k) == (3, 2, 4)
    assert recording.num_tokens == sum(rank.computed_tokens for rank in stats.ranks)
    placed = replace(base, eplb=EplbConfig(init_placement=name, num_redundant_experts=5))
    start = settle(placed).placements
    assert any(placement.slot_experts != spread(16, 3, 5).slot_experts for placement in start.values())
    outputs, _ = run_asks(placed, asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert_same(output, alone(ask))


def test_a_recording_of_another_model_is_refused_and_one_that_is_not_there_too(small_v3: Path, tmp_path: Path):
    recorder = RoutingRecorder(tmp_path / "other", num_layers=2, num_experts=8, top_k=1)
    recorder.add(torch.ones(2, 8, dtype=torch.int64), num_tokens=8)
    recorder.close()
    config = engine_config(small_v3, replace(BASE, ranks=2))
    with pytest.raises(ValueError, match=r"init_placement is .*2 layers with 8 experts; the model has 2 with 16"):
        settle(replace(config, eplb=EplbConfig(init_placement=str(tmp_path / "other"))))
    with pytest.raises(FileNotFoundError, match="no recording of routing"):
        settle(replace(config, eplb=EplbConfig(init_placement=str(tmp_path / "none"))))
