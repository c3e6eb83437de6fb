"""Whole engines with Numba's kernels: the tokens of torch's ops wherever the model has a favourite, the bytes that the
memory plan says, and the threads that were asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ep.cpu.panels import Packed
from ep.cpu.threads import num_threads
from runtime import CacheConfig, Engine, EngineConfig, RequestOutput, SamplingParams, thread_ranks
from runtime.requests.request import Request

TINY = "profiles/models/tiny-v3"
PROMPTS = [[5, 6, 7, 400], [11], [900, 3, 3, 41, 8, 120], list(range(300, 340))]
NEAR = 0.25
"""Log-probabilities of bf16 runs whose matmuls round differently; the model's favourites lead by more."""


def config(ops: str, *, model: str = TINY, **changes: object) -> EngineConfig:
    cache = CacheConfig(num_blocks=32)
    return EngineConfig(model=model, dtype="bfloat16", ops=ops, cache=cache, **changes)  # type: ignore[arg-type]


def decode(ops: str) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)
    with Engine(config(ops)) as engine:
        return engine.generate(PROMPTS, params)


def agreed(found: RequestOutput, wanted: RequestOutput) -> int:
    """Tokens until the two part; they must be near each other till then, and part at a close race only."""
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    for place, (mine, its) in enumerate(zip(found.logprobs, wanted.logprobs, strict=True)):
        tops = list(its.top.values())
        if found.token_ids[place] != wanted.token_ids[place]:
            assert tops[0] - tops[1] < NEAR, (place, its.top, mine.top)
            return place
        assert abs(mine.logprob - its.logprob) < NEAR, (place, mine, its)
    return len(found.token_ids)


def test_packed_weights_decode_to_the_tokens_of_plain_ones():
    same = [agreed(found, wanted) for found, wanted in zip(decode("numba"), decode("reference"), strict=True)]
    assert sum(same) >= 48, same


def test_a_request_has_the_same_bits_whoever_decodes_beside_it():
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    prompts = [
        *PROMPTS,
        *[[(13 * place + 7 * request) % 900 + 5 for place in range(3 + 9 * request)] for request in range(6)],
    ]
    with Engine(config("numba")) as engine:
        together = engine.generate(prompts, params)
        for prompt, beside in zip(prompts[::2], together[::2], strict=True):
            (alone,) = engine.generate([prompt], params)
            assert alone.token_ids == beside.token_ids
            assert alone.logprobs == beside.logprobs


def test_the_plan_counts_the_bytes_that_are_packed(monkeypatch: pytest.MonkeyPatch):
    packed: list[int] = []
    empty = Packed.empty

    def counting(*sizes: int, gated: bool = False) -> Packed:
        room = empty(*sizes, gated=gated)
        packed.append(room.panels_PKN.nbytes)
        return room

    monkeypatch.setattr(Packed, "empty", counting)
    prompts = [[(7 * place + 31 * request) % 150 + 2 for place in range(90)] for request in range(4)]
    with Engine(config("numba")) as engine:
        engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))
        assert sum(packed) == engine.plan.workspaces.packed


@pytest.mark.parametrize("cpu_threads", [1, 2])
def test_every_wave_computes_on_the_threads_that_were_asked_for(small_v3: Path, cpu_threads: int):
    seen: set[tuple[int, int]] = set()

    def drafter(request: Request) -> list[int]:  # called where the rank computes
        seen.add((num_threads(), torch.get_num_threads()))
        return []

    before = torch.get_num_threads()
    try:
        settings = config("auto", model=str(small_v3), load_format="dummy", cpu_threads=cpu_threads)
        with Engine(settings, drafter=drafter) as engine:
            for _ in range(2):
                engine.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=4))
    finally:
        torch.set_num_threads(before)
    assert seen == {(cpu_threads, 1)}


def test_the_thread_that_loads_weights_is_gone_when_ranks_compute(small_v3: Path, monkeypatch: pytest.MonkeyPatch):
    loading: list[threading.Thread] = []

    def assemble(*args: Any, **settings: Any) -> Any:
        loading.append(threading.current_thread())
        return assemble_ranks(*args, **settings)

    assemble_ranks = thread_ranks.assemble
    monkeypatch.setattr(thread_ranks, "assemble", assemble)
    with Engine(config("auto", model=str(small_v3), load_format="dummy")):
        assert [thread.is_alive() for thread in loading] == [False]
