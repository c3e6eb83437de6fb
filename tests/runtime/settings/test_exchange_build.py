"""A rank's exchange, as settled or by trial, and the memory that is planned for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ep import ExchangeConfig, ThreadTransport, choose, exchange_ops, run_ranks
from ep.lanes import NoLanes
from runtime.forward.part_times import NO_PARTS
from runtime.settings import exchange_build
from runtime.settings.config import EngineConfig
from runtime.settings.decisions import topology_of
from runtime.settings.exchange_build import build_exchange, with_back_ends
from runtime.settings.exchange_sizes import exchange_bytes, most_at_once
from runtime.settings.settling import Settled, settle
from tests.ep.pretend_nccl_ep import World
from tests.ep.test_back_ends import Pretended

TINY = "profiles/models/tiny-v3"
LIMIT_S = 60


def tiny(**exchange: object) -> Settled:
    return settle(EngineConfig(model=TINY, ranks=2, exchange=ExchangeConfig(**exchange)))  # type: ignore[arg-type]


def trying(*modes: str) -> Settled:
    """As a GPU would have it: bounded, and these beside it."""
    settled = tiny(exchange="bounded", round_tokens=16)
    first = settled.config.exchange
    return replace(settled, exchange_tries=(first, *(replace(first, exchange=mode) for mode in modes)))


def build(settled: Settled, transport: ThreadTransport, back_end: Pretended, times: dict[str, float], told: list[str]):
    return build_exchange(
        settled, transport, NO_PARTS, ops=exchange_ops("reference"), back_end=back_end.opener(transport),
        tell=told.append, time_us=lambda exchange: times[exchange.config.exchange],
    )  # fmt: skip


@pytest.mark.parametrize("faster", ["bounded", "symmetric"])
def test_the_faster_way_is_built_and_its_times_are_told(monkeypatch, faster):
    monkeypatch.setattr(exchange_build, "refusal", lambda *_: None)
    settled, back_end = trying("symmetric"), Pretended("symmetric", World())
    times = {"bounded": 200.0, "symmetric": 200.0} | {faster: 90.0}

    def fn(transport):
        told: list[str] = []
        return build(settled, transport, back_end, times, told).config.exchange, told

    for mode, told in run_ranks(2, fn, timeout_s=LIMIT_S):
        assert mode == faster
        [line] = told
        assert line.startswith(f"exchange: {faster}, the fastest that passed its self-test")


def test_a_model_whose_rows_the_library_does_not_serve_keeps_bounded_and_says_why(monkeypatch):
    monkeypatch.setattr(exchange_build, "refusal", lambda *_: None)
    settled, back_end = trying("nccl_ep"), Pretended("nccl_ep", World())
    assert settled.model.hidden_size % 512

    def fn(transport):
        told: list[str] = []
        return build(settled, transport, back_end, {"bounded": 5.0}, told).config.exchange, told

    for mode, (_, warning) in run_ranks(2, fn, timeout_s=LIMIT_S):
        assert mode == "bounded"
        assert warning.startswith("warning: exchange nccl_ep is not used: ")
        assert "nccl_ep needs a multiple of" in warning or "adds up in float32" in warning


def test_without_anything_to_try_nobody_is_asked():
    settled = tiny(exchange="bounded", round_tokens=16)

    def fn(transport):
        exchange = build_exchange(
            settled, transport, NO_PARTS, ops=exchange_ops("reference"), back_end=None, tell=pytest.fail
        )
        return exchange.config.exchange

    assert run_ranks(2, fn, timeout_s=LIMIT_S) == ["bounded"] * 2


def test_ranks_that_are_threads_try_nothing_and_cannot_have_what_they_share_a_device_for():
    lanes = NoLanes(torch.device("cpu"))
    settled, _ = with_back_ends(trying("symmetric"), None, lanes, ranks_here=2)  # type: ignore[arg-type]
    assert settled.exchange_tries == ()
    kept, _ = with_back_ends(trying("symmetric"), None, lanes, ranks_here=1)  # type: ignore[arg-type]
    assert len(kept.exchange_tries) == 2
    asked = replace(settled, config=replace(settled.config, exchange=ExchangeConfig(exchange="symmetric")))
    with pytest.raises(ValueError, match="exchange is symmetric, but 2 ranks are threads on one device"):
        with_back_ends(asked, None, lanes, ranks_here=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["nccl_ep", "symmetric"])
def test_a_back_end_that_is_asked_for_on_a_cpu_is_refused_before_anything_is_read(mode):
    with pytest.raises(ValueError, match=f"exchange is '{mode}', which carries rows between GPUs, but device is cpu"):
        tiny(exchange=mode)


def test_the_plan_counts_what_the_library_takes_for_itself():
    """DeepSeek-V3 on 8 ranks, 128 tokens: two banks, each room for 8 ranks' rows there, or their rows back."""
    settled = tiny(round_tokens=128)
    model = replace(settled.model, hidden_size=7168)
    sizes = {}
    for mode in ("bounded", "nccl_ep", "symmetric"):
        way = choose(replace(settled.config.exchange, exchange=mode), exchange=mode, hierarchical="off")  # type: ignore[arg-type]
        config = replace(settled.config, ranks=8, exchange=way)
        sizes[mode] = exchange_bytes(config, model, dtype=torch.bfloat16, topology=topology_of(config), capacities=None)
    rows = 8 * 136 * 7168 * 2
    assert 2 * rows < sizes["nccl_ep"] - sizes["bounded"] < 8 * rows
    assert sizes["symmetric"] < sizes["nccl_ep"]


def test_what_keeps_its_memory_is_counted_beside_the_winner_and_other_ways_one_at_a_time():
    ways = [ExchangeConfig(exchange=mode) for mode in ("nccl_ep", "symmetric")]
    assert most_at_once(10, [7, 3], ways) == 10 + 3
    assert most_at_once(10, [40, 3], ways) == 40 + 3
    assert most_at_once(10, [], []) == 10
