"""Counting experts over a window, and how even a placement makes them."""

import pytest
import torch

from eplb import ExpertLoad, balancedness, rank_loads


def counts(num_tokens: int, top_k: int, *, num_layers: int = 3, num_experts: int = 8, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_layers, num_tokens, num_experts, generator=noise)
    experts = scores.argsort(dim=2)[:, :, :top_k]
    return torch.stack([layer.flatten().bincount(minlength=num_experts) for layer in experts])


def test_a_window_is_the_sum_of_its_steps() -> None:
    load = ExpertLoad(3, 8)
    steps = [(counts(tokens, 2, seed=tokens), tokens) for tokens in (5, 0, 1, 40)]
    for counts_YE, num_tokens in steps:
        load.add(counts_YE, num_tokens=num_tokens)
    load.check_conserved(2)
    assert (load.num_tokens, load.num_steps) == (46, 4)
    window = load.take_window()
    assert torch.equal(window.counts_YE, sum(counts_YE for counts_YE, _ in steps))
    assert (window.num_tokens, window.num_steps) == (46, 4)


def test_a_new_window_starts_at_zero_and_leaves_the_old_one_alone() -> None:
    load = ExpertLoad(3, 8)
    load.add(counts(5, 2), num_tokens=5)
    window = load.take_window()
    load.add(counts(9, 2, seed=1), num_tokens=9)
    assert window.counts_YE.sum() == 3 * 5 * 2
    assert torch.equal(load.counts_YE, counts(9, 2, seed=1))
    assert (load.num_tokens, load.num_steps) == (9, 1)


def test_a_lost_pair_is_named_with_its_layer() -> None:
    load = ExpertLoad(3, 8)
    counts_YE = counts(5, 2)
    counts_YE[1, 0] += 1
    load.add(counts_YE, num_tokens=5)
    with pytest.raises(AssertionError, match=r"MoE layer 1 counted 11 pairs, 5 tokens x top_k 2 = 10"):
        load.check_conserved(2)


def test_counts_of_another_model_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(3, 8\) for \(2, 8\)"):
        ExpertLoad(2, 8).add(counts(5, 2), num_tokens=5)


def test_copies_share_their_experts_count() -> None:
    assert rank_loads([6, 2], [0, 1, 0, -1], 2) == [5.0, 3.0]
    assert balancedness([6, 2], [0, 1, 0, -1], 2) == 0.8


def test_balancedness_goes_from_one_rank_does_all_to_even() -> None:
    assert balancedness([8, 0, 0, 0], [0, 1, 2, 3], 4) == 0.25
    assert balancedness([2, 2, 2, 2], [0, 1, 2, 3], 4) == 1.0
    assert balancedness([0, 0], [0, 1], 2) == 1.0


def test_balancedness_of_a_published_rebalance() -> None:
    """The example in the README of DeepSeek's EPLB, first layer: 12 experts in 16 slots of 8 ranks."""
    weights = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    slots = [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    assert rank_loads(weights, slots, 8) == [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]
    assert balancedness(weights, slots, 8) == pytest.approx(0.8277, abs=1e-4)
