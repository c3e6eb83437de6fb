"""The router against transformers' routers, against a loop, and in the corners where copies of it differ."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from moe import MoeConfig, count_experts, route
from moe.reference import random_weights, route_by_loop
from moe.routing import top_ids

V3 = MoeConfig(
    hidden_size=48,
    intermediate_size=32,
    num_experts=64,
    top_k=8,
    scoring="sigmoid",
    method="noaux_tc",
    num_groups=8,
    topk_groups=4,
    norm_topk_prob=True,
    routed_scaling=2.5,
)
K2 = replace(V3, num_experts=384, num_groups=1, topk_groups=1, routed_scaling=2.827)
GLM = replace(V3, top_k=4, num_groups=1, topk_groups=1, routed_scaling=1.8)
UNNORMED = replace(V3, norm_topk_prob=False, num_groups=4, topk_groups=1)
LITE = MoeConfig(
    hidden_size=48, intermediate_size=32, num_experts=64, top_k=6, num_shared=2, scoring="softmax", method="greedy"
)
V2 = replace(LITE, num_experts=160, method="group_limited_greedy", num_groups=8, topk_groups=3, routed_scaling=16.0)
CONFIGS = {"v3": V3, "k2": K2, "glm": GLM, "unnormed": UNNORMED, "lite": LITE, "v2": V2}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> MoeConfig:
    return request.param


def inputs(config: MoeConfig, num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    weights = random_weights(config, seed=seed, dtype=dtype)
    noise = torch.Generator().manual_seed(seed + 1)
    x_TD = torch.randn(num_tokens, config.hidden_size, generator=noise, dtype=torch.float64).to(dtype)
    return x_TD, weights.gate_ED, weights.bias_E


def oracle_router(config: MoeConfig) -> torch.nn.Module:
    """The router of transformers that stands for this config, without its other layers."""
    fields = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": 4,
        "num_experts_per_tok": config.top_k,
        "n_routed_experts": config.num_experts,
        "n_group": config.num_groups,
        "topk_group": config.topk_groups,
        "routed_scaling_factor": config.routed_scaling,
    }
    if config.scoring == "softmax":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

        return v2.DeepseekV2TopkRouter(v2.DeepseekV2Config(**fields, topk_method=config.method))
    fields["norm_topk_prob"] = config.norm_topk_prob
    if config is GLM:
        from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm

        return glm.Glm4MoeLiteTopkRouter(glm.Glm4MoeLiteConfig(**fields))
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    return v3.DeepseekV3TopkRouter(v3.DeepseekV3Config(**fields))


@pytest.mark.parametrize("seed", [0, 10])
def test_experts_and_weights_are_those_of_transformers(config: MoeConfig, seed: int) -> None:
    x_TD, gate_ED, bias_E = inputs(config, 300, seed=seed)
    router = oracle_router(config)
    router.load_state_dict({"weight": gate_ED} | ({} if bias_E is None else {"e_score_correction_bias": bias_E}))
    with torch.inference_mode():
        _, weights, experts = router(x_TD)
    ours = route(x_TD, gate_ED, bias_E, config)
    # transformers leaves the picked experts unordered: put both in id order
    experts, order = experts.sort(dim=1)
    our_experts, our_order = ours.experts_TK.sort(dim=1)
    assert torch.equal(our_experts, experts)
    assert_close(ours.weights_TK.gather(1, our_order), weights.gather(1, order), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 77])
def test_the_router_is_the_loop(config: MoeConfig, num_tokens: int, dtype: torch.dtype) -> None:
    args = inputs(config, num_tokens, dtype)
    routing, expected = route(*args, config), route_by_loop(*args, config)
    assert torch.equal(routing.experts_TK, expected.experts_TK)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert_close(routing.weights_TK, expected.weights_TK, rtol=tolerance, atol=0)


def test_many_equal_scores_are_picked_as_by_the_loop(config: MoeConfig) -> None:
    noise = torch.Generator().manual_seed(3)
    x_TD = torch.randint(-1, 2, (200, config.hidden_size), generator=noise).to(torch.float32)
    gate_ED = torch.zeros(config.num_experts, config.hidden_size)
    gate_ED[:, :3] = torch.randint(-1, 2, (config.num_experts, 3), generator=noise).to(torch.float32)
    bias_E = torch.randint(-2, 3, (config.num_experts,), generator=noise) / 2 if config.has_bias else None
    experts_TK = route(x_TD, gate_ED, bias_E, config).experts_TK
    assert torch.equal(experts_TK, route_by_loop(x_TD, gate_ED, bias_E, config).experts_TK)


def test_all_equal_scores_go_to_the_lowest_ids(config: MoeConfig) -> None:
    x_TD = torch.zeros(5, config.hidden_size)
    gate_ED = torch.ones(config.num_experts, config.hidden_size)
    bias_E = torch.zeros(config.num_experts) if config.has_bias else None
    experts_TK = route(x_TD, gate_ED, bias_E, config).experts_TK
    assert torch.equal(experts_TK, torch.arange(config.top_k).expand(5, -1))


def test_top_ids_as_drawn_in_its_docstring() -> None:
    scores = torch.tensor([[0.5, 0.9, 0.5, 0.9]])
    assert top_ids(scores, 3).tolist() == [[1, 3, 0]]
    assert scores.tolist() == torch.tensor([[0.5, 0.9, 0.5, 0.9]]).tolist()


def test_a_tie_in_one_row_or_with_the_first_left_out_changes_no_order() -> None:
    noise = torch.Generator().manual_seed(1)
    scores = torch.rand(40, 64, generator=noise)
    scores[7, 60] = scores[7].max() + 1
    scores[7, 3] = scores[7, 60]
    eighth = scores[9].sort(descending=True).values[7]
    scores[9, scores[9] == scores[9].sort(descending=True).values[8]] = eighth
    for rows in (scores, scores[8:9], scores[9:10]):
        expected = rows.sort(dim=1, descending=True, stable=True).indices[:, :8]
        assert torch.equal(top_ids(rows, 8), expected)
    assert top_ids(scores, 64).shape == (40, 64)


def test_a_negative_biased_score_beats_a_shut_out_group() -> None:
    """Groups (0 1) (2 3) (4 5), one kept; a mask of 0 instead of -inf would pick expert 2 for the second place."""
    config = replace(V3, hidden_size=1, num_experts=6, top_k=2, num_groups=3, topk_groups=1)
    bias_E = torch.tensor([-2.0, 0.5, -0.9, -0.9, -0.9, -0.9])
    routing = route(torch.zeros(1, 1), torch.zeros(6, 1), bias_E, config)
    assert routing.experts_TK.tolist() == [[1, 0]]


def test_group_scores_are_top_two_sums_in_v3_and_maxima_in_v2() -> None:
    """Scores near .9 .1 | .6 .6: the maximum prefers the first pair, the sum of two the second."""
    logits = torch.tensor([0.9, 0.1, 0.6, 0.6])
    v3 = replace(V3, hidden_size=1, num_experts=4, top_k=2, num_groups=2, topk_groups=1)
    gate_ED = torch.logit(logits).unsqueeze(1)
    assert route(torch.ones(1, 1), gate_ED, torch.zeros(4), v3).experts_TK.tolist() == [[2, 3]]
    v2 = replace(v3, scoring="softmax", method="group_limited_greedy", norm_topk_prob=False)
    assert route(torch.ones(1, 1), logits.log().unsqueeze(1), None, v2).experts_TK.tolist() == [[0, 1]]


def test_the_bias_moves_the_choice_and_never_the_weights() -> None:
    config = replace(UNNORMED, num_groups=1)
    x_TD, gate_ED, bias_E = inputs(config, 64)
    assert bias_E is not None
    routing = route(x_TD, gate_ED, bias_E, config)
    unbiased = route(x_TD, gate_ED, torch.zeros_like(bias_E), config)
    scores_TE = (x_TD @ gate_ED.T).sigmoid()
    assert not torch.equal(routing.experts_TK, unbiased.experts_TK)
    assert_close(routing.weights_TK, scores_TE.gather(1, routing.experts_TK) * config.routed_scaling)


def test_normalised_weights_add_up_to_the_scaling(config: MoeConfig) -> None:
    sums_T = route(*inputs(config, 50, torch.float64), config).weights_TK.sum(dim=1)
    if config.norm_topk_prob:
        assert_close(sums_T, torch.full_like(sums_T, config.routed_scaling), rtol=1e-14, atol=0)
    else:
        assert sums_T.std() > 0


def test_scores_of_zero_do_not_divide_by_zero() -> None:
    x_TD, gate_ED = torch.ones(1, V3.hidden_size), torch.full((V3.num_experts, V3.hidden_size), -100.0)
    weights_TK = route(x_TD, gate_ED, torch.zeros(V3.num_experts), V3).weights_TK
    assert torch.equal(weights_TK, torch.zeros_like(weights_TK))


def test_float64_sees_what_float32_cannot() -> None:
    config = replace(GLM, hidden_size=1, num_experts=3, top_k=1)
    gate_ED = torch.tensor([[0.5], [0.5 + 1e-13], [0.5 - 1e-13]], dtype=torch.float64)
    x_TD, bias_E = torch.ones(1, 1, dtype=torch.float64), torch.zeros(3)
    assert route(x_TD, gate_ED, bias_E, config).experts_TK.tolist() == [[1]]
    assert route(x_TD.float(), gate_ED, bias_E, config).experts_TK.tolist() == [[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_run_routes_in_float32(config: MoeConfig, dtype: torch.dtype) -> None:
    x_TD, gate_ED, bias_E = inputs(config, 60, dtype)
    routing, widened = route(x_TD, gate_ED, bias_E, config), route(x_TD.float(), gate_ED.float(), bias_E, config)
    assert routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.experts_TK, widened.experts_TK)
    assert torch.equal(routing.weights_TK, widened.weights_TK)


def test_counts_are_conserved_and_leave_out_minus_one(config: MoeConfig) -> None:
    experts_TK = route(*inputs(config, 90), config).experts_TK
    counts_E = count_experts(experts_TK, config.num_experts)
    assert counts_E.sum() == 90 * config.top_k
    assert counts_E.tolist() == [(experts_TK == expert).sum().item() for expert in range(config.num_experts)]
    experts_TK[10:20] = -1
    assert count_experts(experts_TK, config.num_experts).sum() == 80 * config.top_k


def test_count_experts_as_drawn_in_its_docstring() -> None:
    counts_E = count_experts(torch.tensor([[0, 2], [2, -1]]), 4)
    assert counts_E.tolist() == [1, 0, 2, 0]
    assert count_experts(torch.empty(0, 2, dtype=torch.int64), 4).tolist() == [0, 0, 0, 0]
