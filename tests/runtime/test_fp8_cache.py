"""The latent cache in fp8: near a plain one, the same however a request is served, and refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine, EngineConfig, RequestOutput, SamplingParams
from runtime.scheduling.scheduler import SchedulerConfig
from runtime.settings.config import CacheConfig
from runtime.settings.settling import settle
from tests.runtime.checkpoints import SMALL

TINY = "profiles/models/tiny-v3"
PROMPTS = [[5, 6, 7, 400], [11], list(range(20, 90))]
NEAR = 0.2
"""Of a log-probability: what latents off by up to 1/16 each, mostly by less, may move it by on this model; 0.08 was
seen."""


def config(
    kv: str = "fp8", *, dtype: str = "float32", model: str = TINY, page_size: int = 64, **more: Any
) -> EngineConfig:
    cache = CacheConfig(kv_cache_dtype=kv, block_size=page_size)  # type: ignore[arg-type]
    return EngineConfig(model=model, dtype=dtype, cache=cache, **more)  # type: ignore[arg-type]


def decoded(chosen: EngineConfig, num_tokens: int = 16) -> list[RequestOutput]:
    with Engine(chosen) as engine:
        return engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=1))


@pytest.fixture(scope="module")
def fp8() -> list[RequestOutput]:
    return decoded(config())


def test_log_probabilities_stay_near_those_of_a_plain_cache(fp8: list[RequestOutput]):
    compared = []
    for found, truth in zip(fp8, decoded(config("auto")), strict=True):
        assert found.logprobs is not None
        assert truth.logprobs is not None
        for mine, theirs in zip(found.logprobs, truth.logprobs, strict=True):
            if mine.token_id != theirs.token_id:
                break  # what follows is another text
            compared.append(abs(mine.logprob - theirs.logprob))
    assert len(compared) > 20
    assert 0 < max(compared) < NEAR


@pytest.mark.parametrize(
    "how",
    [
        {"ranks": 2},
        {"page_size": 16},
        {"scheduler": SchedulerConfig(max_num_batched_tokens=7)},
    ],
    ids=["ranks", "page-size", "chunks"],
)
def test_how_a_request_is_served_changes_no_token(how: dict[str, Any], fp8: list[RequestOutput]):
    assert [each.token_ids for each in decoded(config(**how))] == [each.token_ids for each in fp8]


def test_both_names_are_one_setting_to_the_group_and_to_the_plan():
    found = [settle(config(name)) for name in ("fp8", "fp8_e4m3")]
    assert len({each.config.digest(each.model) for each in found}) == 1
    assert found[0].config.digest(found[0].model) != settle(config("auto")).config.digest(found[0].model)
    assert [each.plan.kv_bytes_per_token for each in found] == [4 * 656, 4 * 656]
    assert settle(config("bfloat16", dtype="bfloat16")).plan.kv_bytes_per_token == 4 * 1152


@pytest.mark.parametrize(
    ("kv", "dtype", "message"),
    [
        ("fp8", "float64", "kv_cache_dtype is 'fp8'; in a float64 run nothing is narrower, it must be auto"),
        ("bfloat16", "float32", "kv_cache_dtype is 'bfloat16' in a run of float32; .* e.g. auto"),
    ],
)
def test_formats_that_a_run_cannot_have_are_refused(kv: str, dtype: str, message: str):
    with pytest.raises(ValueError, match=message):
        settle(config(kv, dtype=dtype))


def test_latents_that_do_not_fill_groups_are_refused_with_their_rank(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(ValueError, match=r"a scale stands for 128 values, and the model's kv_lora_rank is 32; it must"):
        settle(config(model=str(tmp_path)))


def test_an_unknown_format_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int4'; it must be one of auto, bfloat16, fp8, fp8_e4m3"):
        CacheConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]
