"""Drawn routing is as popular, as limited and as placed as it is said to be."""

from __future__ import annotations

import numpy as np
import pytest

from ep import Topology
from moe import MoeConfig
from runtime.bench.slice_routing import Trace, draw_limited, exchanges, placements, received_pairs

MOE = MoeConfig(
    hidden_size=8, intermediate_size=8, num_experts=16, top_k=4, scoring="sigmoid", method="noaux_tc", num_groups=4,
    topk_groups=2,
)  # fmt: skip
TOPOLOGY = Topology(num_ranks=4, node_size=4)


def trace(shape: str, skew: float = 1.0) -> Trace:
    return Trace.drawn(MOE, shape=shape, skew=skew, num_layers=2, seed=0)  # type: ignore[arg-type]


def test_tokens_stay_within_the_groups_that_they_are_limited_to():
    experts_TK = draw_limited(np.ones(16), 500, MOE, np.random.default_rng(0))
    assert experts_TK.shape == (500, 4)
    assert all(len(set(row)) == 4 for row in experts_TK.tolist())
    assert max(len(set(row // 4)) for row in experts_TK) == 2
    counts_E = np.bincount(experts_TK.ravel(), minlength=16)
    assert counts_E.min() > 0.7 * counts_E.mean()


def test_no_groups_are_no_limit():
    free = MoeConfig(hidden_size=8, intermediate_size=8, num_experts=16, top_k=4, scoring="softmax", method="greedy")
    assert max(len(set(row // 4)) for row in draw_limited(np.ones(16), 500, free, np.random.default_rng(0))) == 4


def test_popular_experts_are_asked_for_as_often_as_the_power_says():
    free = MoeConfig(hidden_size=8, intermediate_size=8, num_experts=16, top_k=1, scoring="softmax", method="greedy")
    drawn = Trace.drawn(free, shape="power-law", skew=1.0, num_layers=1, seed=3)
    counts_E = np.sort(np.bincount(drawn.tokens(0, 20000, np.random.default_rng(0)).ravel(), minlength=16))[::-1]
    wanted_E = 1 / np.arange(1, 17)
    assert counts_E / 20000 == pytest.approx(wanted_E / wanted_E.sum(), abs=0.012)


def test_every_rank_sends_all_its_pairs_and_copies_share_them():
    drawn = trace("power-law")
    places = placements(drawn, TOPOLOGY, placing="balanced", redundant=4, tokens=8)
    found = exchanges(drawn, places, TOPOLOGY, tokens=8, seed=1)
    assert [len(ranks) for ranks in found] == [4, 4]
    pairs_YR = received_pairs(found, slots_per_rank=places[0].slots_per_rank)
    assert pairs_YR.sum(axis=1).tolist() == [4 * 8 * 4] * 2


def test_balanced_experts_load_the_fullest_rank_less_than_placed_ones():
    drawn = trace("power-law", skew=1.5)
    loads = {}
    for placing in ("placed", "balanced"):
        places = placements(drawn, TOPOLOGY, placing=placing, redundant=8, tokens=256)  # type: ignore[arg-type]
        pairs_YR = received_pairs(
            exchanges(drawn, places, TOPOLOGY, tokens=256, seed=1), slots_per_rank=places[0].slots_per_rank
        )
        loads[placing] = (pairs_YR.max(axis=1) / pairs_YR.mean(axis=1)).mean()
    assert loads["balanced"] < 1.15 < loads["placed"]
