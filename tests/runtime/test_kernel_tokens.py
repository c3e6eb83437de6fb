"""Whole models with Triton's kernels (in the interpreter) and in torch: the small trained one decodes to the same
greedy tokens; one in fp8, whose activations kernels round to fp8 and torch does not, stays near."""

import json
from pathlib import Path

import pytest

from runtime import Engine, EngineConfig, SamplingParams
from runtime.settings.config import CacheConfig

pytestmark = [pytest.mark.interpret, pytest.mark.slow]


def greedy_tokens(ops: str, kv_cache_dtype: str) -> list[list[int]]:
    cache = CacheConfig(kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    config = EngineConfig(model="profiles/models/tiny-v3", dtype="float32", ops=ops, cache=cache)  # type: ignore[arg-type]
    with Engine(config) as engine:
        outputs = engine.generate([[5, 6, 7, 400], [11]], SamplingParams(temperature=0.0, max_tokens=3))
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_kernels_decode_to_the_tokens_of_torch(kv_cache_dtype: str):
    wanted = greedy_tokens("reference", kv_cache_dtype)
    assert [len(tokens) for tokens in wanted] == [3, 3]
    assert greedy_tokens("triton", kv_cache_dtype) == wanted


def test_a_model_in_fp8_is_near_in_kernels_to_what_it_is_in_torch(tmp_path: Path):
    shape = json.loads(Path("profiles/models/tiny-v3/config.json").read_text())
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    changes = {"num_hidden_layers": 2, "quantization_config": quantisation | {"activation_scheme": "dynamic"}}
    (tmp_path / "config.json").write_text(json.dumps(shape | changes))
    found: list[dict[int, float]] = []
    for ops in ("reference", "triton"):
        config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32", ops=ops)  # type: ignore[arg-type]
        with Engine(config) as engine:
            assert (engine.plan.weights.attention < 6_000_000) == (ops == "triton")  # all in float32: 7.5 MB
            [output] = engine.generate([[5, 6, 7, 400]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))
        assert output.logprobs is not None
        found.append(dict(output.logprobs[0].top))
    both = found[0].keys() & found[1].keys()
    assert len(both) >= 15
    assert 0 < max(abs(found[0][token] - found[1][token]) for token in both) < 0.25
