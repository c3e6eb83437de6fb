"""Capacities measured from a recording of routing hold what such routing sends, and no more than they must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ep import ExchangeConfig, Topology
from ep.capacity import count_hops, hop_shapes, places_of, uniform_plan
from eplb.recording import Recording, RoutingRecorder
from moe import spread
from runtime.settings.capacities import NUM_EXCHANGES, draw_tokens, read_capacities, replay
from runtime.settings.config import EngineConfig
from runtime.settings.settling import settle

TOPOLOGY = Topology(num_ranks=4, node_size=2)
LAYERS, EXPERTS, TOP_K, TOKENS = 3, 16, 2, 32
PLACEMENTS = dict.fromkeys(range(1, 1 + LAYERS), spread(EXPERTS, 4))


def record(path: Path, weights_E: np.ndarray, *, by_token: bool = False, experts: int = EXPERTS) -> Path:
    """200 tokens a layer whose experts are drawn by `weights_E`, in one step."""
    dice = np.random.default_rng(1)
    chances_E = weights_E / weights_E.sum()
    ids_YTK = np.stack(
        [[dice.choice(experts, TOP_K, replace=False, p=chances_E) for _ in range(200)] for _ in range(LAYERS)]
    )
    counts_YE = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in ids_YTK])
    recorder = RoutingRecorder(
        path, num_layers=LAYERS, num_experts=experts, top_k=TOP_K, num_ranks=4, model="m", max_token_ids=200 * by_token
    )
    recorder.add(torch.from_numpy(counts_YE), num_tokens=200)
    if by_token:
        recorder.add_experts(torch.from_numpy(ids_YTK))
    recorder.close()
    return path


def capacities(path: Path, *, hierarchical: str = "off", combine: str = "ranks") -> list[tuple[int, int]]:
    config = ExchangeConfig(exchange="bounded", hierarchical=hierarchical, combine=combine)  # type: ignore[arg-type]
    plan = read_capacities(str(path), PLACEMENTS, TOPOLOGY, tokens=TOKENS, top_k=TOP_K, config=config)
    shapes = hop_shapes(TOPOLOGY, slots_per_rank=4, hierarchical=hierarchical == "on")
    return [(hop.dispatch(TOKENS, 0), hop.combine(TOKENS, 0)) for hop in places_of(plan, shapes, top_k=TOP_K)]


@pytest.mark.parametrize("by_token", [False, True])
def test_hot_experts_on_one_rank_get_the_room_they_need(tmp_path: Path, by_token: bool):
    hot = np.ones(EXPERTS)
    hot[[0, 1]] = 400.0  # both on rank 0: nearly every token goes there
    [(level, _)] = capacities(record(tmp_path / "level", np.ones(EXPERTS), by_token=by_token))
    [(skewed, _)] = capacities(record(tmp_path / "hot", hot, by_token=by_token))
    assert level < 28 <= skewed <= TOKENS


def test_capacities_hold_what_the_replay_sends_in_all_but_its_fullest_exchanges(tmp_path: Path):
    path = record(tmp_path / "level", np.arange(1.0, 1 + EXPERTS))
    recording = Recording.read(path)
    for hierarchical in ("off", "on"):
        for hop, (places, _) in enumerate(capacities(path, hierarchical=hierarchical)):
            fullest = [
                max(count_hops(ranks, TOPOLOGY, slots_per_rank=4, hierarchical=hierarchical == "on")[hop][0])
                for ranks in replay(recording, list(PLACEMENTS.values()), TOPOLOGY, tokens=TOKENS)
            ]
            enough = 0.99 * NUM_EXCHANGES
            assert sum(rows <= places for rows in fullest) >= enough > sum(rows < places for rows in fullest)


def test_level_routing_needs_less_room_than_is_taken_when_nothing_is_known(tmp_path: Path):
    [(measured, back)] = capacities(record(tmp_path / "level", np.ones(EXPERTS)), combine="slots")
    shapes = hop_shapes(TOPOLOGY, slots_per_rank=4, hierarchical=False)
    [unknown] = places_of(uniform_plan(shapes, TOPOLOGY, top_k=TOP_K, combine="slots"), shapes, top_k=TOP_K)
    assert measured < unknown.dispatch(TOKENS, 0)
    assert measured <= back < unknown.combine(TOKENS, 0)


def test_draws_by_count_follow_the_counts_and_never_take_an_expert_twice(tmp_path: Path):
    weights = np.array([0.0, 1, 2, 3] * 4)
    recording = Recording.read(record(tmp_path / "some", weights))
    drawn = draw_tokens(recording, 0, 4000, np.random.default_rng(2))
    assert drawn.shape == (4000, TOP_K)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    loads_E = recording.loads_YE[0] / recording.loads_YE[0].sum()
    shares_E = np.bincount(drawn.ravel(), minlength=EXPERTS) / drawn.size
    assert shares_E == pytest.approx(loads_E, abs=0.02)
    assert shares_E[loads_E == 0].sum() == 0


def test_a_recording_of_another_model_or_of_nothing_is_refused(tmp_path: Path):
    path = record(tmp_path / "other", np.ones(8), experts=8)
    with pytest.raises(ValueError, match=r"3 layers with 8 experts, top 2; the model has 3 with 16, top 2"):
        capacities(path)
    empty = RoutingRecorder(
        tmp_path / "empty", num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, num_ranks=4, model="m"
    )
    empty.close()
    with pytest.raises(ValueError, match="a recording of no tokens; record a run that decodes some"):
        capacities(tmp_path / "empty")


@pytest.mark.parametrize("path", ["", ".", "/", ".."])
def test_a_path_that_names_no_file_is_refused_in_words(path: str):
    with pytest.raises(ValueError, match=r"must name a file, e\.g\. routing"):
        capacities(Path(path))


def test_capacities_that_nobody_would_use_are_refused():
    with pytest.raises(ValueError, match="capacities is 'x', but the exchange is exact; give --exchange bounded"):
        settle(EngineConfig(model="profiles/models/tiny-v3", ranks=2, capacities="x"))


def test_blocks_that_may_be_too_small_are_told_with_how_often():
    config = EngineConfig(
        model="profiles/models/tiny-v3", ranks=4, node_size=2, exchange=ExchangeConfig(exchange="bounded")
    )
    notes = settle(config).notes
    assert notes[0].startswith("exchange: bounded as asked; by node")
    assert [note.partition(":")[0] for note in notes[1:]] == ["over nodes", "inside a node", "steps that do not fit"]
    assert len(settle(EngineConfig(model="profiles/models/tiny-v3", ranks=4)).notes) == 1
