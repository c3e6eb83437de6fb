"""A MoE config says what it does not accept, and what it would."""

from dataclasses import replace

import pytest

from moe import MoeConfig

V3 = MoeConfig(
    hidden_size=64,
    intermediate_size=32,
    num_experts=64,
    top_k=8,
    num_shared=1,
    scoring="sigmoid",
    method="noaux_tc",
    num_groups=8,
    topk_groups=4,
    norm_topk_prob=True,
    routed_scaling=2.5,
)
V2 = replace(V3, scoring="softmax", method="group_limited_greedy", norm_topk_prob=False)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (V3, {"top_k": 0}, "top_k 0 must be at least 1"),
        (V3, {"hidden_size": -5}, "hidden_size -5 must be at least 1"),
        (V3, {"num_shared": -1}, r"num_shared -1 must be at least 0 \(0 means no shared expert\)"),
        (V3, {"top_k": 65}, "top_k 65 must be at most num_experts 64"),
        (V3, {"routed_scaling": float("nan")}, "routed_scaling nan must be a finite number above 0, such as 1.0"),
        (V3, {"scoring": "sqrtsoftplus"}, "scoring 'sqrtsoftplus' is not implemented: one of softmax, sigmoid"),
        (V3, {"method": "hash"}, "method 'hash' is not implemented: one of greedy, group_limited_greedy, noaux_tc"),
        (V3, {"scoring": "softmax"}, "scoring 'softmax' does not go with method 'noaux_tc': it needs 'sigmoid'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob True has no agreed meaning with scoring 'softmax'"),
        (V3, {"num_groups": 7}, "num_groups 7 must divide num_experts 64: 8 would"),
        (V3, {"topk_groups": 9}, "topk_groups 9 must be at most num_groups 8"),
        (V3, {"num_groups": 64, "topk_groups": 8}, "num_groups 64 leaves 1 expert a group, .* needs 2: 32 would do"),
        (V3, {"top_k": 33}, "topk_groups 4 x 8 experts a group cannot hold top_k 33: at least 5"),
    ],
)
def test_a_bad_field_is_named_with_its_rule(config: MoeConfig, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


def test_groups_vanish_when_all_are_kept() -> None:
    assert V3.is_group_limited
    assert not replace(V3, num_groups=1, topk_groups=1).is_group_limited
    assert not replace(V3, topk_groups=8).is_group_limited


def test_greedy_takes_no_notice_of_groups() -> None:
    assert not replace(V2, method="greedy", num_groups=7, topk_groups=3).is_group_limited


def test_one_expert_is_a_model_too() -> None:
    config = replace(V3, num_experts=1, top_k=1, num_groups=1, topk_groups=1, num_shared=0)
    assert config.shared_intermediate_size == 0
