"""A rank's slice does the work of that rank among all, and says what it may not be asked for."""

from __future__ import annotations

import pytest
import torch

from runtime.bench.rank_slice import RankSlice
from runtime.bench.slice_config import SliceConfig, cut_layers, engine_config
from runtime.bench.stages import LAYER_BEGINS, STAGES, by_stage
from runtime.model.model_config import read_model_config

pytestmark = pytest.mark.timeout(120)


def config(**changes) -> SliceConfig:
    usual = {
        "model": "profiles/models/tiny-v3", "ranks": 4, "batch": 6, "context": 70, "layers": 3, "device": "cpu",
        "hardware": "profiles/hardware/cpu.toml", "steps": 2, "routing": "power-law", "node_size": 2,
    }  # fmt: skip
    return SliceConfig(**(usual | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["off", "on"])
def built(request) -> RankSlice:
    torch.set_num_threads(1)
    return RankSlice(config(hierarchical=request.param))


def test_its_experts_compute_what_the_others_send_and_its_own(built):
    batch = built.config.batch
    built.measure(batch)
    steps = built.steps(batch)
    with torch.inference_mode():
        launched = steps.launch()
    moe, rank, layers = built.model.moe, built.rank, built.model.moe_layers
    assert moe is not None
    found = built.exchanges(batch)
    wanted = 0
    for index, layer in enumerate(layers):
        placement = built.settled.placements[layer]
        others = [slots_TK for other, slots_TK in enumerate(found[index % len(found)]) if other != rank]
        wanted += int((torch.cat(others) // placement.slots_per_rank == rank).sum())
        held = torch.tensor(placement.experts_of(rank))
        wanted += int(launched.counts_LE[index][held[held >= 0]].sum())  # no copies: what goes to these comes here
    assert launched.num_pairs() == wanted > 0


def test_a_step_is_told_stage_by_stage_and_layer_by_layer(built):
    times = built.measure(built.config.batch)
    assert times.step_us > 0
    stages = by_stage(times.intervals)
    wanted = {stage for stages in STAGES.values() for stage in stages.values()}
    assert wanted <= set(stages)
    assert {each.layer for each in times.intervals if each.stage == LAYER_BEGINS} == {0, 1, 2}
    assert "routed experts" not in by_stage(times.intervals, range(1))  # the layer without experts
    assert "routed experts" in by_stage(times.intervals, range(1, 2))
    assert times.sent.network > 0
    assert times.sent.node > 0


def test_half_a_batch_sends_half_the_bytes_or_less(built):
    whole, half = built.measure(6), built.measure(3)
    assert 0 < half.sent.node < whole.sent.node


def test_the_fullest_rank_is_measured_unless_another_is_asked_for():
    chosen = RankSlice(config(placing="placed"))
    assert chosen.imbalance == pytest.approx(chosen.pairs_YR.sum(axis=0).max() / chosen.pairs_YR.sum() * 4)
    assert chosen.imbalance > 1.0
    assert RankSlice(config(placing="placed", rank=(chosen.rank + 1) % 4)).imbalance < chosen.imbalance


def test_a_cut_model_keeps_one_layer_without_experts():
    whole = RankSlice(config(layers=None)).model
    assert cut_layers(whole, 3).num_dense_layers == 1
    assert len(cut_layers(whole, 3).moe_layers) == 2
    assert cut_layers(whole, 99) is whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 65}, "at most 64"),
        ({"layers": 2}, "at least 3"),
        ({"rank": 4}, "ranks are 0 to 3"),
        ({"batch": 0}, "batch is 0"),
        ({"skew": 5.0}, "from 0 to 4"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_a_context_beyond_the_model_s_length_is_refused_with_one_that_fits_and_can_be_fitted():
    asked = config(context=2048)
    with pytest.raises(ValueError, match=r"^context is 2048; with the 20 tokens .* at most 2048, e\.g\. 1984$"):
        RankSlice(asked)
    model = read_model_config(asked.model)
    assert asked.fitted(model).context == 1984
    assert config(context=70).fitted(model) == config(context=70)
    engine_config(asked.fitted(model), model)
