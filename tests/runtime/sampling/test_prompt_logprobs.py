"""Log-probabilities of a prompt's tokens are those that sampling them would have reported, however it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import Engine, RequestOutput, SamplingParams
from runtime.requests.request import Request
from runtime.sampling.prompt_logprobs import AT_ONCE, PromptPart, look_up
from tests.runtime.mixes import Ask, Settings, engine_config, run_mix

PROMPT = tuple((7 * n) % 150 + 2 for n in range(70))
ASKED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=3)
SETTINGS = {
    "alone": Settings(),
    "chunks": Settings(max_num_batched_tokens=9, async_depth=1),
    "one token at a time": Settings(max_num_batched_tokens=1),
    "two ranks and two tracks": Settings(ranks=2, tracks=2, async_depth=1, max_num_batched_tokens=40),
    "preempted": Settings(block_size=8, num_blocks=14, max_num_batched_tokens=40, async_depth=1),
}


@pytest.fixture(scope="module")
def truth(small_v3: Path) -> list[tuple[float, dict[int, float]]]:
    """For each token but the first: the engine is given what comes before, and asked for one token with all odds."""
    found = []
    with Engine(engine_config(small_v3, Settings())) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=3)
        for end in range(1, len(PROMPT)):
            forced = replace(params, logit_bias={PROMPT[end]: 100.0})
            [output] = engine.generate([PROMPT[:end]], forced)
            [entry] = output.logprobs or []
            assert entry.token_id == PROMPT[end]
            found.append((entry.logprob, entry.top))
    return found


def check(output: RequestOutput, truth: list[tuple[float, dict[int, float]]], prompt: tuple[int, ...]) -> None:
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in others if entry is not None] == list(prompt[1:])
    for entry, (logprob, top) in zip(others, truth, strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(logprob, abs=1e-10)
        assert list(entry.top) == list(top)
        assert list(entry.top.values()) == pytest.approx(list(top.values()), abs=1e-10)


@pytest.mark.parametrize("name", SETTINGS)
def test_they_are_what_sampling_would_report_in_any_setting(small_v3: Path, truth, name: str):
    lengths = (70, 1, 2, 33, 64)
    asks = [Ask(prompt=PROMPT[:length], params=ASKED) for length in lengths]
    others = [Ask(prompt=PROMPT[5:25], params=replace(ASKED, prompt_logprobs=None, max_tokens=30))] * 3
    outputs = run_mix(small_v3, asks + others, SETTINGS[name])
    for length, output in zip(lengths, outputs, strict=False):
        check(output, truth[: length - 1], PROMPT[:length])
        assert len(output.token_ids) == 3
    assert [output.prompt_logprobs for output in outputs[len(lengths) :]] == [None] * 3
    assert (name == "preempted") == any(output.num_preemptions for output in outputs)


def test_a_cached_prompt_is_computed_again_for_who_asks(small_v3: Path, truth):
    settings = Settings(block_size=8, enable_prefix_caching=True)
    with Engine(engine_config(small_v3, settings)) as engine:
        engine.generate([PROMPT], replace(ASKED, prompt_logprobs=None))
        [again] = engine.generate([PROMPT], replace(ASKED, prompt_logprobs=None))
        [asked] = engine.generate([PROMPT], ASKED)
    assert (again.num_cached_tokens, asked.num_cached_tokens) == (64, 0)
    check(asked, truth, PROMPT)


def test_no_most_likely_tokens_may_be_asked_for(small_v3: Path, truth):
    [output] = run_mix(small_v3, [Ask(prompt=PROMPT[:9], params=replace(ASKED, prompt_logprobs=0))], Settings())
    check(output, [(logprob, {}) for logprob, _ in truth[:8]], PROMPT[:9])


def test_a_long_prompt_has_few_logits_in_memory_at_a_time():
    sizes: list[int] = []

    def head(hidden_PD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_PD))
        return hidden_PD

    prompt = tuple(n % 5 for n in range(200))
    request = Request(id="x", prompt=prompt, params=replace(ASKED, prompt_logprobs=2), arrival=0)
    hidden_PD = torch.randn(199, 5, dtype=torch.float64)
    found = look_up([PromptPart(request, 1, 199, 0)], hidden_PD, head=head)
    assert max(sizes) == AT_ONCE
    assert sum(sizes) == 199
    expected = hidden_PD.log_softmax(-1)[torch.arange(199), torch.tensor(prompt[1:])]
    assert torch.equal(found.logprob_P, expected)


def test_logits_that_are_no_numbers_are_reported_and_not_ranked():
    request = Request(id="x", prompt=(0, 1, 2), params=replace(ASKED, prompt_logprobs=2), arrival=0)
    hidden_PD = torch.tensor([[1.0, float("nan"), 0.0], [1.0, 0.5, 0.0]], dtype=torch.float64)
    found = look_up([PromptPart(request, 1, 2, 0)], hidden_PD, head=lambda x_PD: x_PD)
    assert found.logprob_P.isnan().tolist() == [True, False]
    assert found.top_ids_PK.tolist() == [[0, 1], [0, 1]]
