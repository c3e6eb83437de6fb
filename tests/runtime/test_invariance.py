"""In float64 no setting changes a token, and none moves a log-probability by more than 1e-10.

Every request of a mix is compared with itself alone: one rank, one chunk, depth 0, no prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Request, RequestOutput, SamplingParams
from tests.runtime.mixes import Ask, Settings, run_mix

VOCAB = 160
LOGPROB_TOLERANCE = 1e-10


def assert_same(found: RequestOutput, truth: RequestOutput) -> None:
    assert found.token_ids == truth.token_ids
    assert found.finish_reason == truth.finish_reason
    assert found.logprobs is not None
    assert truth.logprobs is not None
    for place, (mine, theirs) in enumerate(zip(found.logprobs, truth.logprobs, strict=True)):
        assert abs(mine.logprob - theirs.logprob) <= LOGPROB_TOLERANCE, f"step {place}: {mine} against {theirs}"
        assert list(mine.top) == list(theirs.top), f"step {place}"
        for token, logprob in mine.top.items():
            assert abs(logprob - theirs.top[token]) <= LOGPROB_TOLERANCE, f"step {place}, token {token}"


def check(model: Path, asks: list[Ask], chosen: Settings, alone: Callable[[Ask], RequestOutput]) -> list[RequestOutput]:
    outputs = run_mix(model, asks, chosen, drafter=drafter_for(asks, alone, chosen.draft_share))
    for ask, output in zip(asks, outputs, strict=True):
        assert_same(output, alone(ask))
    return outputs


def drafter_for(
    asks: list[Ask], alone: Callable[[Ask], RequestOutput], share: float | None
) -> Callable[[Request], list[int]] | None:
    """Proposes up to three tokens, each right with probability `share` (by position, so that runs repeat)."""
    if share is None:
        return None

    def draft(request: Request) -> list[int]:
        truth = alone(asks[int(request.id)]).token_ids
        tokens = truth[request.num_output : request.num_output + 3]
        return [
            token if random.Random(f"{request.id}:{request.num_output + i}").random() < share else (token + 1) % VOCAB
            for i, token in enumerate(tokens)
        ]

    return draft


def mixed_asks(seed: int, count: int) -> list[Ask]:
    """Short and long prompts, some with a common beginning; greedy and sampled."""
    rng = random.Random(seed)
    common = tuple(rng.randrange(VOCAB) for _ in range(70))
    asks = []
    for index in range(count):
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 17, 64, 65, 90])))
        prompt = common[: rng.choice([0, 16, 64, 70])] + tail
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            seed=1000 + index,
            max_tokens=rng.choice([1, 6, 20]),
            min_tokens=rng.choice([0, 1]),
            logprobs=3,
        )
        asks.append(Ask(prompt=prompt, params=params, priority=rng.choice([0, 1])))
    return asks


BASE = Settings(num_blocks=200, block_size=16, enable_prefix_caching=True, async_depth=1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_no_number_of_ranks_changes_an_answer(small_v3: Path, alone, ranks: int, async_depth: int):
    check(small_v3, mixed_asks(1, 10), replace(BASE, ranks=ranks, async_depth=async_depth), alone)


@pytest.mark.parametrize("budget", [7, 64, 8192])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_no_token_budget_and_no_page_size_changes_an_answer(small_v3: Path, alone, budget: int, block_size: int):
    chosen = replace(BASE, ranks=2, max_num_batched_tokens=budget, block_size=block_size, num_blocks=2048 // block_size)
    check(small_v3, mixed_asks(2, 10), chosen, alone)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_no_drafter_changes_an_answer(small_v3: Path, alone, share: float, async_depth: int):
    asks = mixed_asks(3, 8)
    for ask in asks:
        alone(ask)
    chosen = replace(BASE, ranks=2, async_depth=async_depth, draft_share=share)
    check(small_v3, asks, chosen, alone)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_preempted_requests_answer_as_if_nothing_had_happened(small_v3: Path, alone, async_depth: int):
    asks = [Ask(prompt=ask.prompt[:30], params=replace(ask.params, max_tokens=40)) for ask in mixed_asks(4, 8)]
    chosen = replace(BASE, ranks=2, async_depth=async_depth, block_size=4, num_blocks=24, max_num_seqs=4)
    outputs = check(small_v3, asks, chosen, alone)
    assert sum(output.num_preemptions for output in outputs) > 0


def test_prefix_hits_answer_as_if_everything_had_been_computed(small_v3: Path, alone):
    [first, *_] = mixed_asks(5, 1)
    prompt = tuple(range(2, 92))
    asks = [Ask(prompt=(*prompt, i), params=replace(first.params, seed=i)) for i in range(6)]
    outputs = check(small_v3, asks, replace(BASE, max_num_seqs=2), alone)
    assert sum(output.num_cached_tokens for output in outputs) > 0


asks_strategy = st.builds(mixed_asks, st.integers(0, 10), st.integers(1, 9))
settings_strategy = st.builds(
    Settings,
    ranks=st.sampled_from([1, 2, 3, 8, 16]),
    async_depth=st.sampled_from([0, 1]),
    max_num_batched_tokens=st.sampled_from([7, 64, 8192]),
    block_size=st.sampled_from([1, 16, 64]),
    num_blocks=st.sampled_from([256, 1024]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    enable_prefix_caching=st.booleans(),
    round_tokens=st.sampled_from([3, 16, 1024]),
    combine=st.sampled_from(["ranks", "slots"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    draft_share=st.sampled_from([None, None, 0.5]),
    tracks=st.sampled_from([1, 1, 2, 3]),
    track_order=st.sampled_from(["abreast", "staggered"]),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=asks_strategy, chosen=settings_strategy)
def test_no_mix_of_settings_changes_an_answer(small_v3: Path, alone, asks: list[Ask], chosen: Settings):
    check(small_v3, asks, chosen, alone)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=asks_strategy, chosen=settings_strategy)
@pytest.mark.timeout(3600)
def test_no_mix_of_settings_changes_an_answer_for_long(small_v3: Path, alone, asks: list[Ask], chosen: Settings):
    check(small_v3, asks, chosen, alone)
