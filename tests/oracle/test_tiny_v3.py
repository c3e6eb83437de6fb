"""The bundled trained model, in float32 against transformers: trained routing is skewed, random routing is not.

Text, not only tokens: the prompts go through the folder's tokenizer and the answers come back through it, as a user
sees them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from runtime import Engine, EngineConfig, SamplingParams

from .families import NEAR_TIE

MODEL = Path(__file__).parents[2] / "profiles" / "models" / "tiny-v3"
PROMPTS = ("class", "A class definition", "This module provides")
NUM_TOKENS = 48
EOS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The oracle's greedy text after `prompt`, and the log-probability of each of its tokens."""

    prompt: list[int]
    text: str
    logprobs_T: Tensor


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def answers(tokenizer: Tokenizer, quiet_transformers: None) -> list[Answer]:
    from transformers import DeepseekV3ForCausalLM

    from .oracle import Oracle

    oracle = Oracle.load(MODEL, model_class=DeepseekV3ForCausalLM, config=None)
    answers = []
    for prompt in (tokenizer.encode(text).ids for text in PROMPTS):
        tokens = oracle.greedy(prompt, NUM_TOKENS, stop=frozenset({EOS}))
        verdict = oracle.judge(prompt, tokens)
        assert verdict.router_margin >= NEAR_TIE
        logprobs_T = verdict.logprobs_TV.max(dim=-1).values
        answers.append(Answer(prompt=prompt, text=tokenizer.decode(tokens), logprobs_T=logprobs_T))
    return answers


@pytest.mark.parametrize("ranks", [1, 4])
def test_greedy_text_of_the_bundled_model_is_the_oracles(
    ranks: int, tokenizer: Tokenizer, answers: list[Answer]
) -> None:
    prompts = [answer.prompt for answer in answers]
    with Engine(EngineConfig(model=str(MODEL), dtype="float32", ranks=ranks)) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0))
    assert [tokenizer.decode(list(output.token_ids)) for output in outputs] == [answer.text for answer in answers]
    for answer, output in zip(answers, outputs, strict=True):
        assert output.logprobs is not None
        ours_T = torch.tensor([step.logprob for step in output.logprobs], dtype=torch.float64)
        torch.testing.assert_close(ours_T, answer.logprobs_T, rtol=0, atol=1e-4)


def test_the_bundled_models_text_reads_like_english(answers: list[Answer]) -> None:
    """Else equal text would prove little: a model that repeats one token agrees with any other that does."""
    for answer in answers:
        words = answer.text.split()
        assert len(words) >= 10
        assert len(set(words)) >= 5
