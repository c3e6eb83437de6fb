"""Loads and placements in force to new placements: what is gained, what moves, what stays, what is refused."""

import numpy as np
import pytest
import torch

from eplb import POLICIES, PlanConfig, RebalancePlan, check_plan, plan, rank_loads
from moe import ExpertPlacement, spread


def loads_of(num_layers: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(size=(num_layers, num_experts))
    return torch.from_numpy(np.rint(1000 * np.exp(noise))).to(torch.int64)


def planned(
    loads: torch.Tensor, num_ranks: int, old: list[ExpertPlacement] | None = None, **how: object
) -> RebalancePlan:
    config = PlanConfig(**how)  # pyright: ignore[reportArgumentType]
    start = spread(loads.shape[1], num_ranks, config.num_redundant)
    return plan(loads, old=old or [start] * len(loads), config=config)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_plan_says_how_level_ranks_are_and_how_level_they_will_be(policy: str) -> None:
    loads = loads_of(3, 24)
    done = planned(loads, 4, num_redundant=8, policy=policy)
    start = spread(24, 4, 8)
    for layer in range(3):
        for said, held in ((done.layers[layer].before, start), (done.layers[layer].after, done.placements[layer])):
            on_ranks = rank_loads(loads[layer].tolist(), held.slot_experts, 4)
            assert said == pytest.approx(sum(on_ranks) / 4 / max(on_ranks))
    assert done.before < 0.8
    assert done.after > 0.95
    assert done.changed == (0, 1, 2)
    assert [placement.epoch for placement in done.placements] == [1, 1, 1]


def test_moves_and_bytes_are_counted_by_experts_that_ranks_do_not_hold_yet() -> None:
    done = planned(loads_of(3, 24), 4, num_redundant=8, expert_bytes=100)
    start, moves = spread(24, 4, 8), 0
    for placement in done.placements:
        moves += sum(len(set(placement.experts_of(rank)) - set(start.experts_of(rank))) for rank in range(4))
    assert moves == done.num_moves > 0
    assert done.num_bytes == 100 * moves
    assert sum(layer.moves for layer in done.layers) == moves


def test_a_layer_that_gains_too_little_keeps_its_very_placement() -> None:
    loads = loads_of(4, 32)
    first = planned(loads, 4, num_redundant=4)
    again = planned(loads, 4, list(first.placements), num_redundant=4)
    assert all(new is old for new, old in zip(again.placements, first.placements, strict=True))
    assert (again.changed, again.num_moves, again.before) == ((), 0, again.after)

    gains = [1 - layer.before / layer.after for layer in first.layers]
    limit = sorted(gains)[1]
    some = planned(loads, 4, num_redundant=4, min_gain=limit + 1e-9)
    assert some.changed == tuple(layer for layer, gain in enumerate(gains) if gain > limit + 1e-9)
    assert len(some.changed) == 2
    assert planned(loads, 4, num_redundant=4, min_gain=0.99).changed == ()


def test_layers_without_load_stay_and_the_others_are_planned() -> None:
    loads = loads_of(3, 24)
    loads[1] = 0
    done = planned(loads, 4, num_redundant=8)
    assert done.changed == (0, 2)
    assert (done.layers[1].before, done.layers[1].after, done.layers[1].moves) == (1.0, 1.0, 0)
    assert planned(torch.zeros(2, 24), 4).changed == ()
    assert plan(torch.zeros(0, 24), old=[], config=PlanConfig()).placements == ()


def test_the_next_epoch_is_past_all_others() -> None:
    start = spread(24, 4)
    later = ExpertPlacement(num_ranks=4, slots_per_rank=6, slot_experts=start.slot_experts, epoch=7)
    done = planned(loads_of(2, 24), 4, [start, later])
    assert {placement.epoch for placement in done.placements} == {8}


def test_one_rank_has_nothing_to_plan() -> None:
    assert planned(loads_of(2, 24), 1).changed == ()


def test_with_noise_the_prediction_is_what_steps_will_show() -> None:
    loads = loads_of(2, 64)
    averages = planned(loads, 8, num_redundant=8, top_k=4)
    with_noise = planned(loads, 8, num_redundant=8, top_k=4, tokens_per_rank=32.0)
    assert averages.after > 0.99
    assert 0.80 < with_noise.after < 0.95
    assert with_noise.before < averages.before


def test_numbers_that_give_no_placement_are_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match=r"num_redundant_experts 25 must be from 0 to 24: .* so 24 would do"):
        check_plan(PlanConfig(num_redundant=25), num_experts=24, num_ranks=2)
    with pytest.raises(ValueError, match=r"num_redundant_experts 3 does not fit .* deepseek: .* 4 ranks; 4 would do"):
        check_plan(PlanConfig(num_redundant=3, policy="deepseek"), num_experts=24, num_ranks=4)
    with pytest.raises(ValueError, match=r"groups is 5; it must divide the 24 experts, e\.g\. 1"):
        check_plan(PlanConfig(groups=5), num_experts=24, num_ranks=4)
    with pytest.raises(ValueError, match=r"num_redundant_experts 8 needs 8 slots a rank, .* has 6; 0 would do"):
        planned(loads_of(1, 24), 4, [spread(24, 4)], num_redundant=8)
    for field, value, words in (
        ("policy", "best", "eplb_policy is 'best'; it must be one of serried, deepseek"),
        ("min_gain", 1.0, "eplb_min_gain is 1.0; it must be from 0 to below 1"),
        ("tokens_per_rank", -1.0, "tokens_per_rank is -1.0; it must be at least 0"),
        ("top_k", 0, "top_k is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            PlanConfig(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_loads_that_count_nothing_are_refused(wrong: float) -> None:
    loads = loads_of(1, 24).to(torch.float64)
    loads[0, 3] = wrong
    with pytest.raises(ValueError, match="loads hold a negative or infinite number"):
        planned(loads, 4)
