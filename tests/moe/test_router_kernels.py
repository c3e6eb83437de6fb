"""The router in Triton's interpreter against `route` and `choose_slots`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe import MoeConfig, PlacementTable, choose_slots, count_experts, route, spread
from moe.ops import Routed
from moe.reference import random_weights
from moe.router_kernels import PARTS, choose_experts, router_logits

pytestmark = pytest.mark.interpret
V3 = MoeConfig(
    hidden_size=72, intermediate_size=8, num_experts=24, top_k=4, scoring="sigmoid", method="noaux_tc", num_groups=4,
    topk_groups=2, norm_topk_prob=True, routed_scaling=2.5,
)  # fmt: skip
V2 = replace(V3, scoring="softmax", method="group_limited_greedy", norm_topk_prob=False)
CONFIGS = {
    "v3": V3,
    "v2": V2,
    "lite": replace(V2, method="greedy", top_k=6, num_groups=1, topk_groups=1),
    "k2": replace(V3, num_groups=1, topk_groups=1, num_experts=23, top_k=5),
    "all experts": replace(V2, method="greedy", num_experts=5, top_k=5, num_groups=1, topk_groups=1),
}


def choose(
    parts_STE: Tensor, bias_E: Tensor | None, config: MoeConfig, table: PlacementTable, positions_T: Tensor
) -> Routed:
    """What the kernel fills in; memory is full of rubbish before, counts are not."""
    num_tokens = parts_STE.shape[1]
    routed = Routed(
        slots_TK=torch.full((num_tokens, config.top_k), -77),
        weights_TK=torch.full((num_tokens, config.top_k), torch.nan),
        experts_TK=torch.full((num_tokens, config.top_k), -77),
        counts_E=torch.full((config.num_experts,), 100),
    )
    choose_experts(parts_STE, bias_E, config, table, rank=1, positions_T=positions_T, **routed._asdict())
    return routed


def of_logits(logits_TE: Tensor) -> Tensor:
    """Parts whose sum is exactly that."""
    parts_STE = torch.zeros(PARTS, *logits_TE.shape)
    parts_STE[3] = logits_TE
    return parts_STE


def test_the_docstrings_token_picks_its_group() -> None:
    config = replace(V3, num_experts=4, top_k=2, num_groups=2, topk_groups=1, norm_topk_prob=False, routed_scaling=1.0)
    parts_STE = of_logits(torch.tensor([[3.0, 0.0, 1.0, 2.0]]))
    for norm, weights in ((False, [0.88, 0.73]), (True, [0.55, 0.45])):
        routed = choose(
            parts_STE, torch.zeros(4), replace(config, norm_topk_prob=norm), spread(4, 2).table(), torch.tensor([7])
        )
        assert routed.experts_TK.tolist() == [[3, 2]]
        assert routed.weights_TK[0].tolist() == pytest.approx(weights, abs=5e-3)


@pytest.mark.parametrize("copies", ["one", "all alike", "own first"])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_slots_and_counts_are_equal_and_weights_close(name: str, copies: str) -> None:
    """Two tokens are padding; the sizes of groups, experts and picks are no powers of two."""
    config = CONFIGS[name]
    weights = random_weights(config, seed=1, dtype=torch.float32)
    x_TD = torch.randn(19, config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    positions_T = 7 * torch.arange(19) + 3
    positions_T[[2, 18]] = -1
    placement = spread(config.num_experts, 4, 0 if copies == "one" else 2 * config.num_experts)
    table = placement.table(rank=1 if copies == "own first" else None, node_size=2)

    parts_STE = torch.full((PARTS, 19, config.num_experts), torch.nan)
    router_logits(x_TD, weights.gate_ED, parts_STE)
    assert torch.allclose(parts_STE.sum(0), x_TD.float() @ weights.gate_ED.T, rtol=0, atol=2e-6)
    routed = choose(parts_STE, weights.bias_E, config, table, positions_T)

    expected = route(x_TD, weights.gate_ED, weights.bias_E, config)
    experts_TK = expected.experts_TK.masked_fill(positions_T.unsqueeze(1) < 0, -1)
    assert torch.equal(routed.experts_TK, experts_TK)
    assert torch.equal(routed.slots_TK, choose_slots(experts_TK, table, rank=1, positions_T=positions_T))
    assert torch.equal(routed.counts_E, 100 + count_experts(experts_TK, config.num_experts))
    real = positions_T >= 0
    assert torch.allclose(routed.weights_TK[real], expected.weights_TK[real], rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_scores_go_to_the_lowest_id_at_every_step(name: str) -> None:
    config = CONFIGS[name]
    logits_TE = torch.randint(0, 2, (16, config.num_experts), generator=torch.Generator().manual_seed(4)).float()
    bias_E = torch.zeros(config.num_experts) if config.has_bias else None
    routed = choose(of_logits(logits_TE), bias_E, config, spread(config.num_experts, 4).table(), torch.arange(16))
    expected = route(logits_TE, torch.eye(config.num_experts), bias_E, config)
    assert torch.equal(routed.experts_TK, expected.experts_TK)


def test_a_row_of_nan_picks_experts_that_exist_and_weighs_them_as_nan() -> None:
    logits_TE = torch.full((1, 24), torch.nan)
    routed = choose(of_logits(logits_TE), torch.zeros(24), V3, spread(24, 4).table(), torch.tensor([0]))
    assert routed.experts_TK.unique().numel() == 4
    assert ((routed.experts_TK >= 0) & (routed.experts_TK < 24)).all()
    assert routed.weights_TK.isnan().all()


def test_a_token_does_not_depend_on_its_mates() -> None:
    """But for its copy of an expert, which depends on its row."""
    weights = random_weights(V3, seed=1, dtype=torch.float32)
    x_TD = torch.randn(35, V3.hidden_size, generator=torch.Generator().manual_seed(3))
    found = []
    for rows in (slice(0, 35), slice(34, 35)):
        parts_STE = torch.full((PARTS, x_TD[rows].shape[0], 24), torch.nan)
        router_logits(x_TD[rows], weights.gate_ED, parts_STE)
        routed = choose(parts_STE, weights.bias_E, V3, spread(24, 4).table(), torch.arange(35)[rows])
        found.append((parts_STE[:, -1], routed.experts_TK[-1], routed.weights_TK[-1], routed.slots_TK[-1]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_no_tokens_are_no_work() -> None:
    parts_STE = torch.empty(PARTS, 0, 24)
    router_logits(torch.empty(0, 72), torch.empty(24, 72), parts_STE)
    routed = choose(parts_STE, torch.zeros(24), V3, spread(24, 4).table(), torch.empty(0, dtype=torch.int64))
    assert routed.counts_E.tolist() == [100] * 24
