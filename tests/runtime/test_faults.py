"""A rank that is elsewhere in the program, where no transport compares tags: its blocks say so, and the group ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runtime.loop.instruments
from ep import Exchange, ExchangeConfig, Kind, Tag, TagMismatch
from runtime import Engine, SamplingParams
from tests.runtime.mixes import Settings, engine_config

SAME = Tag(0, 0, 0, 0, Kind.CHECK)
BOUNDED = ExchangeConfig(exchange="bounded", hierarchical="off")
SETTINGS = Settings(num_blocks=64, block_size=16, ranks=3)


class Blind:
    """A transport that carries all under one tag, as NCCL does."""

    def __init__(self, inner: Any) -> None:
        self.rank, self.size, self._inner = inner.rank, inner.size, inner

    def all_to_all(self, recv: Any, send: Any, *, tag: Tag, **splits: Any) -> Any:
        return self._inner.all_to_all(recv, send, tag=SAME, **splits)


class Late(Exchange):
    """Rank 1 takes step 2 for step 1."""

    def __init__(self, transport: Any, **how: Any) -> None:
        super().__init__(Blind(transport), **how)  # type: ignore[arg-type]

    def dispatch(self, *row: Any, tag: Tag, **how: Any) -> Any:
        return super().dispatch(*row, tag=tag._replace(step=1) if (self.rank, tag.step) == (1, 2) else tag, **how)


@pytest.mark.parametrize(("async_depth", "tracks"), [(0, 1), (1, 1), (1, 2)])
def test_all_ranks_end_with_the_name_of_the_one_that_is_a_step_behind(
    small_v3: Path, async_depth: int, tracks: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runtime.loop.instruments, "Exchange", Late)
    config = replace(
        engine_config(small_v3, replace(SETTINGS, async_depth=async_depth, tracks=tracks)), exchange=BOUNDED
    )
    with pytest.raises(TagMismatch) as raised, Engine(config) as engine:
        engine.generate([[5, 6, 7], [8]], SamplingParams(temperature=0.0, max_tokens=8))
    assert (raised.value.culprit, raised.value.expected.step, raised.value.found.step) == (1, 2, 1)
