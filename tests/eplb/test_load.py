"""Counting experts over a window, and how even a placement makes them."""

import time

import pytest
import torch

from eplb import ExpertLoad, LoadWindow, balancedness, rank_loads
from eplb.load import WEIGHT_UNIT


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
    window = load.window()
    assert torch.equal(window.counts_YE, sum(counts_YE for counts_YE, _ in steps))
    assert (window.num_tokens, window.num_steps) == (46, 4)


def test_counting_on_leaves_a_window_alone() -> None:
    load = ExpertLoad(3, 8)
    load.add(counts(5, 2), num_tokens=5)
    window = load.window()
    load.add(counts(9, 2, seed=1), num_tokens=9)
    assert torch.equal(window.counts_YE, counts(5, 2))
    assert (window.num_tokens, window.num_steps) == (5, 1)


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


@pytest.mark.parametrize(("window", "parts"), [(1, 1), (4, 1), (10, 3), (12, 4), (5, 8)])
def test_the_window_slides_by_parts_and_holds_its_steps(window: int, parts: int) -> None:
    load = ExpertLoad(3, 8, window=window, parts=parts)
    steps = [(counts(tokens, 2, seed=tokens), tokens) for tokens in range(40)]
    for done, (counts_YE, num_tokens) in enumerate(steps, start=1):
        load.add(counts_YE, num_tokens=num_tokens)
        load.check_conserved(2)
        assert min(done, window) <= load.num_steps < window + 2 * -(-window // parts)
        inside = steps[done - load.num_steps : done]
        assert load.num_tokens == sum(tokens for _, tokens in inside)
        assert torch.equal(load.counts_YE, sum(counts_YE for counts_YE, _ in inside))


def test_the_weighted_view_favours_newer_parts_and_conserves() -> None:
    load = ExpertLoad(3, 8, window=6, parts=3)
    steps = [(counts(tokens, 2, seed=tokens), tokens) for tokens in (3, 5, 8, 1, 9)]
    for counts_YE, num_tokens in steps:
        load.add(counts_YE, num_tokens=num_tokens)
    view = load.weighted(0.5)
    weights = [WEIGHT_UNIT // 4] * 2 + [WEIGHT_UNIT // 2] * 2 + [WEIGHT_UNIT]  # parts of two steps, the last not full
    assert torch.equal(view.counts_YE, sum(w * counts_YE for w, (counts_YE, _) in zip(weights, steps, strict=True)))
    assert view.num_tokens == sum(w * tokens for w, (_, tokens) in zip(weights, steps, strict=True))
    view.check_conserved(2)
    assert torch.equal(load.weighted(1.0).counts_YE, WEIGHT_UNIT * load.counts_YE)


def test_words_bring_a_window_to_other_ranks_and_their_sum_is_the_groups() -> None:
    windows = [
        LoadWindow(counts_YE=counts(tokens, 2, seed=tokens), num_tokens=tokens, num_steps=4) for tokens in (5, 0, 9)
    ]
    words = torch.stack([window.to_words() for window in windows])
    assert words.dtype == torch.int64
    read = [LoadWindow.from_words(row, num_layers=3, num_experts=8) for row in words]
    total = LoadWindow.total(read)
    assert (total.num_tokens, total.num_steps) == (14, 4)
    assert torch.equal(total.counts_YE, sum(window.counts_YE for window in windows))
    assert torch.equal(windows[0].counts_YE, counts(5, 2, seed=5))
    total.check_conserved(2)
    with pytest.raises(AssertionError, match="3 steps beside 4"):
        LoadWindow.total([read[0], LoadWindow(counts_YE=counts(1, 2), num_tokens=1, num_steps=3)])


def test_a_step_of_58_layers_of_256_experts_takes_less_than_30_us() -> None:
    load = ExpertLoad(58, 256, window=1000)
    counts_YE = torch.ones(58, 256, dtype=torch.int64)
    best = 1.0
    for _ in range(20):
        began = time.process_time()
        for _ in range(100):
            load.add(counts_YE, num_tokens=32)
        best = min(best, (time.process_time() - began) / 100)
    assert best < 30e-6, f"{best * 1e6:.1f} us"
