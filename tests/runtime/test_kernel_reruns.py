"""Steps whose rows did not fit, and steps that are launched twice, with Triton's kernels (in the interpreter): the
tokens are those of torch, whatever is run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ep import ExchangeConfig
from runtime import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from tests.runtime.tight import be_cramped

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

RANKS = 2
PROMPTS: Sequence[list[int]] = ([5, 6, 7], [20, 21, 22], [3])


def config(model: Path, ops: str) -> EngineConfig:
    return EngineConfig(
        model=str(model), ranks=RANKS, dtype="float32", load_format="dummy", ops=ops, async_depth=1,  # type: ignore[arg-type]
        cache=CacheConfig(block_size=16, num_blocks=12), exchange=ExchangeConfig(exchange="bounded"),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32),
    )  # fmt: skip


def decode(engine: Engine) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.7 * (index == 1), seed=3, max_tokens=3, ignore_eos=True)
        engine.submit(prompt, params, request_id=str(index))
    found = {output.request_id: list(output.token_ids) for output in engine.run()}
    return [found[str(index)] for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def reference(two_layers: Path) -> list[list[int]]:
    """Of torch, with room for every row."""
    with Engine(config(two_layers, "reference")) as engine:
        return decode(engine)


def test_rows_left_behind_change_no_token(two_layers, reference, monkeypatch):
    built = be_cramped(monkeypatch, 1)
    with Engine(config(two_layers, "triton")) as engine:
        assert decode(engine) == reference
        stats = engine.stats().ranks
    assert [rank.overflow_steps for rank in stats] == [len(exchange.steps) for exchange in built]
    assert all(rank.rerun_steps > 0 for rank in stats)
    assert all(rank.free_pages == rank.num_pages for rank in stats)


def test_steps_that_are_launched_twice_change_no_token(two_layers, reference):
    with Engine(config(two_layers, "triton")) as engine:
        for worker in engine._ranks.workers:  # type: ignore[attr-defined]
            worker.run_twice = lambda step: step % 2 == 0
        assert decode(engine) == reference
        assert all(rank.free_pages == rank.num_pages for rank in engine.stats().ranks)
