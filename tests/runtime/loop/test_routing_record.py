"""Files of --record-routing: experts token by token, the same whatever else happens to a step, and refused early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo import DboConfig
from eplb import Recording
from eplb.config import EplbConfig
from runtime import Engine, EngineConfig
from runtime.loop.routing_record import rank_file, read_routing
from runtime.settings.settling import settle
from tests.runtime.mixes import Ask, Settings, engine_config
from tests.runtime.test_invariance import mixed_asks
from tests.runtime.tight import be_cramped

PLAIN = Settings(num_blocks=200, block_size=16, enable_prefix_caching=False, async_depth=1, max_num_seqs=4)
TWO_TRACKS = DboConfig(dbo="on", dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
ALL = 100_000


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return [Ask(prompt=ask.prompt[:30], params=replace(ask.params, max_tokens=9)) for ask in mixed_asks(20, 8)]


def recorded(
    model: Path, name: Path, asks: list[Ask], *, tokens: int, overlap: DboConfig | None = None, **settings: Any
) -> Any:
    """Rank 0's counters after the run."""
    config = engine_config(model, replace(PLAIN, **settings))
    eplb = EplbConfig(record_routing=str(name), record_routing_tokens=tokens)
    with Engine(replace(config, eplb=eplb, overlap=overlap or DboConfig())) as engine:
        for ask in asks:
            engine.submit(ask.prompt, ask.params)
        engine.run()
        return engine.stats().ranks[0]


def visits(recording: Recording) -> list[list[list[int]]]:
    """The experts of all tokens, in no order."""
    assert recording.experts_MYK is not None
    return sorted(np.sort(recording.experts_MYK, axis=2).tolist())


def assert_adds_up(recording: Recording) -> None:
    """The tokens of each step, one by one, are those that were counted in it."""
    assert recording.experts_MYK is not None
    assert recording.of_steps_M is not None
    counted = np.zeros_like(recording.counts_NYE)
    for step, token in zip(recording.of_steps_M, recording.experts_MYK, strict=True):
        for layer, experts in enumerate(token):
            counted[step, layer, experts] += 1
    assert np.array_equal(counted, recording.counts_NYE)


@pytest.fixture(scope="module")
def truth(small_v3: Path, asks: list[Ask], tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """Of one rank, one step at a time."""
    name = tmp_path_factory.mktemp("truth") / "routing"
    recorded(small_v3, name, asks, tokens=ALL, ranks=1, async_depth=0)
    return visits(read_routing(name))


@pytest.mark.parametrize(
    ("settings", "overlap"),
    [({"ranks": 3}, None), ({"ranks": 2, "async_depth": 0}, TWO_TRACKS), ({"ranks": 4, "round_tokens": 3}, TWO_TRACKS)],
)
def test_each_token_is_recorded_once_with_the_experts_it_visits(
    small_v3: Path, asks: list[Ask], truth: Any, tmp_path: Path, settings: Any, overlap: DboConfig | None
):
    name = tmp_path / "routing"
    stats = recorded(small_v3, name, asks, tokens=ALL, overlap=overlap, **settings)
    assert (stats.cut_steps > 0) == (overlap is not None)
    assert visits(read_routing(name)) == truth
    for rank in range(settings["ranks"]):
        assert_adds_up(Recording.read(rank_file(name, rank)))


def test_a_step_that_is_run_again_is_recorded_once(
    small_v3: Path, asks: list[Ask], truth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    be_cramped(monkeypatch, 1)
    stats = recorded(small_v3, tmp_path / "routing", asks, tokens=ALL, ranks=4, overlap=TWO_TRACKS)
    assert stats.rerun_steps > 0
    assert visits(read_routing(tmp_path / "routing")) == truth
    for rank in range(4):
        assert_adds_up(Recording.read(rank_file(tmp_path / "routing", rank)))


def test_only_the_first_tokens_of_a_rank_are_recorded_and_none_where_nobody_asked(
    small_v3: Path, asks: list[Ask], tmp_path: Path
):
    recorded(small_v3, tmp_path / "few", asks, tokens=7, ranks=2)
    few = [Recording.read(rank_file(tmp_path / "few", rank)) for rank in range(2)]
    assert [len(each.experts_MYK) for each in few if each.experts_MYK is not None] == [7, 7]
    assert all(each.num_tokens > 7 for each in few)
    recorded(small_v3, tmp_path / "none", asks, tokens=0, ranks=2)
    none = read_routing(tmp_path / "none")
    assert none.experts_MYK is None
    assert np.array_equal(none.loads_YE, read_routing(tmp_path / "few").loads_YE)


def refused(model: Path, **eplb: Any) -> EngineConfig:
    return replace(engine_config(model, replace(PLAIN, ranks=2)), eplb=EplbConfig(**eplb))


def test_a_recording_that_could_not_be_written_is_refused_before_anything_is_decoded(small_v3: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"record_routing is .*there is no folder .*nowhere"):
        settle(refused(small_v3, record_routing=str(tmp_path / "nowhere" / "routing")))
    (tmp_path / "routing.1").mkdir()
    with pytest.raises(ValueError, match=r"record_routing is .*routing.1, a rank's file, is a folder"):
        settle(refused(small_v3, record_routing=str(tmp_path / "routing")))
    for name in ("", "/", ".."):
        with pytest.raises(ValueError, match=r"record_routing is .*; it must name a file, e.g. routing"):
            EplbConfig(record_routing=name)
    with pytest.raises(ValueError, match="init_placement is ''; it must name a file"):
        EplbConfig(init_placement="")
    with pytest.raises(ValueError, match="record_routing_tokens is 5, but nothing is recorded"):
        EplbConfig(record_routing_tokens=5)
    with pytest.raises(ValueError, match="record_routing_tokens is -1; it must be at least 0"):
        EplbConfig(record_routing="routing", record_routing_tokens=-1)
