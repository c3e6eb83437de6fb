"""Experts that move while other things happen to the same steps: re-runs, two tracks, a rank that is out of step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import runtime.loop.rebalance
from dbo import DboConfig
from eplb import PlanConfig
from eplb.config import EplbConfig
from eplb.goal import Question
from moe import spread
from runtime import RequestOutput
from runtime.forward.experts import Experts
from runtime.scheduling.heartbeat import Disagreement
from tests.eplb.banks import moe_config
from tests.runtime.loop.test_rebalance import moving, run_asks
from tests.runtime.mixes import Ask
from tests.runtime.rebalancing import random_planner
from tests.runtime.test_invariance import assert_same, mixed_asks
from tests.runtime.tight import be_cramped

PLANNER_OF = runtime.loop.rebalance.planner_of


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.loop.rebalance, "planner_of", random_planner)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_that_are_run_again_find_their_experts(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], monkeypatch: pytest.MonkeyPatch, depth: int
):
    """Rows that do not fit order re-runs, of steps that were launched before a switch too."""
    asks = [Ask(prompt=ask.prompt[:30], params=replace(ask.params, max_tokens=12)) for ask in mixed_asks(20, 8)]
    truth = [alone(ask) for ask in asks]
    be_cramped(monkeypatch, 1)
    outputs, stats = run_asks(moving(small_v3, ranks=4, redundant=8, async_depth=depth), asks)
    for output, answer in zip(outputs, truth, strict=True):
        assert_same(output, answer)
    assert stats.ranks[0].rerun_steps > 2
    assert stats.ranks[0].experts.rebalances >= 1


def test_two_tracks_find_their_experts(small_v3: Path, alone: Callable[[Ask], RequestOutput]):
    asks = mixed_asks(21, 8)
    config = moving(small_v3, ranks=2, redundant=8)
    overlap = DboConfig(dbo="on", dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    outputs, stats = run_asks(replace(config, overlap=overlap), asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert_same(output, alone(ask))
    assert stats.ranks[0].cut_steps > 0
    assert stats.ranks[0].experts.rebalances >= 2


def test_the_planner_is_told_what_was_counted_and_leaves_layers_with_half_the_gain_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    told: list[PlanConfig] = []
    monkeypatch.setattr(runtime.loop.rebalance, "plan", lambda _counts, *, old, config: told.append(config))
    moe = moe_config(6, top_k=3)
    config = EplbConfig(enable_eplb=True, num_redundant_experts=2, eplb_min_gain=0.08, eplb_policy="deepseek")
    question = Question(
        layers=slice(0, 1), counts_YE=torch.ones(1, 6), old=[spread(6, 2, 2)], node_size=2, tokens_per_rank=7.5
    )
    PLANNER_OF(config, moe)(question)
    [found] = told
    assert found == PlanConfig(
        num_redundant=2, top_k=3, node_size=2, groups=1, tokens_per_rank=7.5, min_gain=0.04, policy="deepseek"
    )


def test_a_rank_that_switches_by_itself_is_named(small_v3: Path, monkeypatch: pytest.MonkeyPatch):
    plain = Experts.epoch.fget
    assert plain is not None

    def epoch(self: Experts) -> int:
        ahead = self.rebalancer is not None and self.rebalancer._transport.rank == 1 and self.rebalancer.epoch == 1
        return plain(self) + ahead

    monkeypatch.setattr(Experts, "epoch", property(epoch))
    with pytest.raises(Disagreement, match=r"ranks disagree on epoch before step .*: rank 1 says 2") as caught:
        run_asks(moving(small_v3, ranks=3, redundant=4), mixed_asks(22, 6))
    assert (caught.value.field, caught.value.culprit) == ("epoch", 1)
