"""The step loop against the whole model as one plain function, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime import Engine, SamplingParams
from runtime.forward.reference import reference_logits
from tests.runtime.mixes import Settings, engine_config

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_tokens_and_log_probabilities_are_those_of_the_plain_function(small_v3: Path, length: int, async_depth: int):
    settings = Settings(async_depth=async_depth, max_num_batched_tokens=50, block_size=16, num_blocks=64)
    prompt = torch.randint(2, 160, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    with Engine(engine_config(small_v3, settings)) as engine:
        [output] = engine.generate([prompt], PARAMS)
        [worker] = engine._ranks.workers
        tokens_T = torch.tensor(prompt + output.token_ids)
        logits_TV = reference_logits(engine.model, worker.decoder.weights, tokens_T)
    logprobs_NV = logits_TV[length - 1 : -1].log_softmax(dim=1)
    assert logprobs_NV.dtype is torch.float64
    assert logprobs_NV.argmax(dim=1).tolist() == output.token_ids
    assert len(set(output.token_ids)) > 4
    assert output.logprobs is not None
    for place, entry in enumerate(output.logprobs):
        for token, logprob in entry.top.items():
            assert abs(logprob - logprobs_NV[place, token].item()) < 1e-10, (place, token)
