"""Engines that hand prompts to each other, as threads of one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime import Engine, RequestOutput, SamplingParams
from runtime.loop.worker import Worker
from runtime.requests.kv_config import KvConfig
from tests.runtime.mixes import Ask, Settings, engine_config

BASE = Settings(num_blocks=120, block_size=16, enable_prefix_caching=True, async_depth=1, ranks=2)


def engine(model: Path, settings: Settings = BASE, **kv: Any) -> Engine:
    return Engine(replace(engine_config(model, settings), kv=KvConfig(**kv)))


def prefill(engine: Engine, asks: Sequence[Ask], *, marks: bool = True) -> list[dict[str, Any] | None]:
    """What the prefill engine answers for each prompt, as a gateway asks it."""
    for index, ask in enumerate(asks):
        params = replace(ask.params, max_tokens=1, min_tokens=0, ignore_eos=True)
        wanted = {"do_remote_decode": True, "do_remote_prefill": False} if marks else None
        engine.submit(ask.prompt, params, request_id=f"p{index}", kv_transfer_params=wanted)
    outputs = {output.request_id: output for output in engine.run()}
    return [outputs[f"p{index}"].kv_transfer_params for index in range(len(asks))]


def decode(engine: Engine, asks: Sequence[Ask], given: Sequence[dict[str, Any] | None]) -> list[RequestOutput]:
    for index, (ask, params) in enumerate(zip(asks, given, strict=True)):
        engine.submit(ask.prompt, ask.params, request_id=f"d{index}", kv_transfer_params=params)
    outputs = {output.request_id: output for output in engine.run()}
    return [outputs[f"d{index}"] for index in range(len(asks))]


def workers(engine: Engine) -> tuple[Worker, ...]:
    """Its ranks; to be looked at between waves."""
    return engine._ranks.workers


def total(engine: Engine, name: str) -> int:
    """A count of `KvStats` over all ranks."""
    return sum(getattr(stats.kv, name) for stats in engine.stats().ranks)


def check_whole(engine: Engine, *, within_s: float = 30.0) -> None:
    """Between waves: every page comes back, whoever held it for others."""
    end = time.monotonic() + within_s
    for worker in workers(engine):
        while worker.scheduler.hand_over.awaits and time.monotonic() < end:
            time.sleep(0.005)
            assert worker.scheduler.hand_over.turn() == []
    for stats in engine.stats().ranks:
        assert (stats.lent_pages, stats.free_pages) == (0, stats.num_pages), f"rank {stats.rank} leaked pages"


GREEDY = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2)
