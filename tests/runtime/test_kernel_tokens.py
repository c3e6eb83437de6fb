"""The small trained model decodes to the same greedy tokens with Triton's kernels as in torch (in the interpreter)."""

import pytest

from runtime import Engine, EngineConfig, SamplingParams
from runtime.config import CacheConfig

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
