"""Our decode against transformers in float32, every family: the same greedy tokens, the same log-probabilities.

Six prompts of 1 to 300 tokens go through one engine at once, 64 steps each, so that chunks of prompts and decode rows
share steps and ranks. Then one teacher-forced forward of the oracle per prompt judges all 64 steps (see oracle.py). For
log-probabilities the demand is 1e-4 at every step, for the sampled token and for the best N that were asked for.

T tokens  V vocabulary
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from runtime import Engine, EngineConfig, RequestOutput, SamplingParams, SchedulerConfig

from .families import FP8, NEAR_TIE, NUM_TOKENS, PROMPT_LENGTHS, Family

if TYPE_CHECKING:
    from .conftest import Checkpoint
    from .oracle import Verdict

TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One prompt's decode and what the oracle says of it."""

    prompt: list[int]
    output: RequestOutput
    verdict: "Verdict"


def decode(folder: Path, prompts: Sequence[Sequence[int]], *, ranks: int) -> list[RequestOutput]:
    """Greedy, `NUM_TOKENS` each whatever they are; prompt i asks for the best i log-probabilities."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=i) for i in range(len(prompts))
    ]
    scheduler = SchedulerConfig(max_model_len=max(PROMPT_LENGTHS) + NUM_TOKENS)
    with Engine(EngineConfig(model=str(folder), dtype="float32", ranks=ranks, scheduler=scheduler)) as engine:
        return engine.generate(prompts, params)


@pytest.fixture(scope="session")
def judgements() -> dict[str, list[Judged]]:
    """Every family's decode so far: five tests look at each."""
    return {}


@pytest.fixture
def judged(family: Family, checkpoint: "Checkpoint", judgements: dict[str, list[Judged]]) -> list[Judged]:
    if family.name not in judgements:
        prompts = family.prompts()
        outputs = decode(checkpoint.dressed, prompts, ranks=family.ranks)
        judgements[family.name] = [
            Judged(prompt=prompt, output=output, verdict=checkpoint.oracle.judge(prompt, output.token_ids))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
    return judgements[family.name]


def assert_close(ours_T: Tensor, oracle_T: Tensor, *, what: str) -> None:
    """Within `TOLERANCE` everywhere; says where it is worst."""
    away_T = (ours_T - oracle_T).abs()
    worst = int(away_T.argmax())
    assert float(away_T[worst]) <= TOLERANCE, (
        f"{what}: step {worst} of {len(away_T)} is {float(ours_T[worst]):.6f}, the oracle has "
        f"{float(oracle_T[worst]):.6f}; {int((away_T > TOLERANCE).sum())} steps are off by more than {TOLERANCE}"
    )


def test_greedy_tokens_are_the_oracles(judged: list[Judged]) -> None:
    for one in judged:
        expected = one.verdict.logprobs_TV.argmax(dim=-1).tolist()
        agreed = sum(ours == theirs for ours, theirs in zip(one.output.token_ids, expected, strict=True))
        assert list(one.output.token_ids) == expected, (
            f"after {len(one.prompt)} prompt tokens {agreed} of {NUM_TOKENS} agree; nearest choices of the oracle: "
            f"router {one.verdict.router_margin:.1e}, token {one.verdict.token_margin:.1e}"
        )


def test_every_request_is_whole(judged: list[Judged]) -> None:
    assert [len(one.prompt) for one in judged] == list(PROMPT_LENGTHS)
    for one in judged:
        assert list(one.output.prompt_token_ids) == one.prompt
        assert len(one.output.token_ids) == NUM_TOKENS
        assert one.output.finish_reason == "length"


def test_log_probabilities_of_every_step_are_the_oracles(judged: list[Judged]) -> None:
    for one in judged:
        steps = one.output.logprobs
        assert steps is not None
        assert [step.token_id for step in steps] == list(one.output.token_ids)
        ours_T = torch.tensor([step.logprob for step in steps], dtype=torch.float64)
        oracle_T = one.verdict.logprobs_TV.gather(1, torch.tensor(one.output.token_ids)[:, None])[:, 0]
        assert_close(ours_T, oracle_T, what=f"prompt of {len(one.prompt)}")


def test_best_log_probabilities_are_the_oracles(judged: list[Judged]) -> None:
    """By value, rank by rank, and by id: two tokens nearer than the tolerance may change places, no more."""
    for num_best, one in enumerate(judged):
        assert one.output.logprobs is not None
        assert [len(step.top) for step in one.output.logprobs] == [num_best] * NUM_TOKENS
        if num_best == 0:
            continue
        ids_TN = torch.tensor([list(step.top) for step in one.output.logprobs])
        ours_TN = torch.tensor([list(step.top.values()) for step in one.output.logprobs], dtype=torch.float64)
        best_TN = one.verdict.logprobs_TV.topk(num_best).values
        what = f"best {num_best} of prompt of {len(one.prompt)}"
        for rank in range(num_best):
            assert_close(ours_TN[:, rank], best_TN[:, rank], what=f"{what}, value {rank}")
            ids_T1 = ids_TN[:, rank : rank + 1]
            assert_close(ours_TN[:, rank], one.verdict.logprobs_TV.gather(1, ids_T1)[:, 0], what=f"{what}, id {rank}")


def test_the_comparison_is_fair_and_says_something(judged: list[Judged]) -> None:
    """No choice of the oracle is within rounding of another one, and its tokens are many and distinct."""
    assert min(one.verdict.router_margin for one in judged) >= NEAR_TIE
    assert min(one.verdict.token_margin for one in judged) >= 2 * TOLERANCE
    assert min(len(set(one.output.token_ids)) for one in judged) >= NUM_TOKENS // 3
    assert len({token for one in judged for token in one.output.token_ids}) >= 2 * NUM_TOKENS


@pytest.mark.parametrize("family", [FP8], ids=["fp8"], indirect=True)
def test_fp8_blocks_are_found_by_their_tensors(
    family: Family, checkpoint: "Checkpoint", judged: list[Judged], tmp_path: Path
) -> None:
    """Some quantised checkpoints have a config.json that reads like bfloat16."""
    shutil.copytree(checkpoint.dressed, tmp_path, dirs_exist_ok=True)
    config = {key: value for key, value in family.config.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = decode(tmp_path, [one.prompt for one in judged[:3]], ranks=family.ranks)
    assert [output.token_ids for output in found] == [one.output.token_ids for one in judged[:3]]
