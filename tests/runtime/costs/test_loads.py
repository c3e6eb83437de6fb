"""How unevenly ranks are loaded before anything was recorded, held against published simulations."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.costs.loads import level_imbalance, loaded_imbalance


@pytest.mark.parametrize(("ranks", "balance"), [(8, 0.80), (16, 0.67), (32, 0.43), (64, 0.29)])
def test_experts_in_order_are_as_uneven_as_published(ranks: int, balance: float):
    """Mean over max of the ranks, log-normal popularity, 128 tokens a rank; it depends on the draw."""
    assert 1 / loaded_imbalance(ranks=ranks, experts=256, top_k=8, tokens=128) == pytest.approx(balance, abs=0.08)


@pytest.mark.parametrize(
    ("ranks", "redundant", "tokens", "balance"),
    [(8, 32, 128, 0.956), (16, 16, 128, 0.951), (32, 32, 128, 0.937), (32, 32, 64, 0.913), (32, 32, 256, 0.954),
     (64, 64, 128, 0.919)],
)  # fmt: skip
def test_placed_experts_leave_what_chance_leaves(ranks: int, redundant: int, tokens: int, balance: float):
    found = level_imbalance(ranks=ranks, experts=256, redundant=redundant, top_k=8, tokens=tokens, drift=1.0)
    assert 1 / found == pytest.approx(balance, abs=0.016)


def test_what_chance_leaves_is_what_drawing_tokens_gives():
    """16 ranks of 16 experts, all as popular: 64 tokens each choose 8 different ones."""
    draws = np.random.default_rng(3)
    fullest = []
    for _ in range(60):
        experts = np.argsort(draws.random((16 * 64, 256)), axis=1)[:, :8]
        fullest.append(np.bincount(experts.ravel() // 16, minlength=16).max() / (64 * 8))
    found = level_imbalance(ranks=16, experts=256, redundant=0, top_k=8, tokens=64, drift=1.0)
    assert found == pytest.approx(np.mean(fullest), abs=0.012)


def test_one_busy_expert_cannot_be_placed_but_copied():
    few, some, many = (
        level_imbalance(ranks=64, experts=256, redundant=copies, top_k=8, tokens=128) for copies in (0, 64, 256)
    )
    assert few > 2.7 > 1.2 > some
    assert many == pytest.approx(some, rel=0.01)


@pytest.mark.parametrize("changes", [{"ranks": 1}, {"tokens": 0}, {"experts": 0}])
def test_nobody_waits_where_there_is_one_rank_or_nothing_to_do(changes: dict):
    group = {"ranks": 8, "experts": 256, "top_k": 8, "tokens": 64.0, **changes}
    assert level_imbalance(redundant=0, **group) == loaded_imbalance(**group) == 1.0
