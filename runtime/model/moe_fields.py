"""The router and experts of a config file, checked against what the family's formula can do.

Knows the Hugging Face names of the fields; the formula itself is `moe`'s.
"""

from __future__ import annotations

from moe import MoeConfig

from .config_fields import Fields
from .model_families import GLM4_MOE_LITE, MOST_EXPERTS, Family, Method


def read_moe(fields: Fields, family: Family, hidden_size: int) -> MoeConfig | None:
    """The experts' configuration, None when n_routed_experts is null or 0 (a dense model)."""
    num_experts = fields.integer_or_none("n_routed_experts", low=0, high=MOST_EXPERTS)
    if not num_experts:
        return None
    for alias in ("num_experts", "num_local_experts"):
        fields.require(alias, num_experts, "it stands beside n_routed_experts and must agree")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        fields.refuse("num_experts_per_tok", f"it must be at most n_routed_experts, {num_experts}")
    method = fields.choice("topk_method", family.methods)
    scoring = fields.choice("scoring_func", (family.scoring,), family.scoring)
    norm_topk_prob = fields.boolean("norm_topk_prob")
    if family.scoring == "softmax" and norm_topk_prob:
        fields.refuse("norm_topk_prob", "softmax scores are not renormalised in any published file; it must be false")
    num_groups, topk_groups = _read_groups(fields, method, num_experts=num_experts, top_k=top_k)
    return MoeConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        num_shared=fields.integer_or_none("n_shared_experts", low=0, high=MOST_EXPERTS) or 0,
        scoring=scoring,
        method=method,
        num_groups=num_groups,
        topk_groups=topk_groups,
        norm_topk_prob=norm_topk_prob,
        routed_scaling=fields.number("routed_scaling_factor"),
    )


def read_num_dense_layers(fields: Fields, family: Family, num_layers: int) -> int:
    """How many layers at the front have a dense MLP, from first_k_dense_replace or mlp_layer_types."""
    kinds = fields.get("mlp_layer_types", None)
    if kinds is not None:
        return _dense_prefix(fields, kinds, num_layers)
    if family is GLM4_MOE_LITE:
        fields.require("first_k_dense_replace", 1, "glm4_moe_lite has one dense layer unless mlp_layer_types says more")
        return 1
    return min(fields.integer("first_k_dense_replace", low=0), num_layers)


def _dense_prefix(fields: Fields, kinds: object, num_layers: int) -> int:
    num_dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        fields.refuse("mlp_layer_types", f'it must be {num_layers} layers, "dense" ones first, then "sparse" ones')
    if fields.has("first_k_dense_replace"):
        fields.require("first_k_dense_replace", num_dense, "mlp_layer_types says otherwise; the two must agree")
    return num_dense


def _read_groups(fields: Fields, method: Method, *, num_experts: int, top_k: int) -> tuple[int, int]:
    """(n_group, topk_group); (1, 1) for the greedy method, which has no groups whatever the file says."""
    num_groups, topk_groups = fields.get("n_group"), fields.get("topk_group")
    if method == "greedy":
        return 1, 1
    num_groups, topk_groups = fields.integer("n_group"), fields.integer("topk_group")
    if num_experts % num_groups:
        near = max(size for size in range(1, min(num_groups, num_experts) + 1) if num_experts % size == 0)
        fields.refuse("n_group", f"it must divide n_routed_experts, {num_experts}, e.g. {near}")
    group_size = num_experts // num_groups
    if method == "noaux_tc" and group_size < 2:
        fields.refuse("n_group", f"a group's score is the sum of its two best; at most {num_experts // 2} groups fit")
    if topk_groups > num_groups:
        fields.refuse("topk_group", f"it must be at most n_group, {num_groups}")
    if topk_groups * group_size < top_k:
        fields.refuse(
            "topk_group",
            f"{topk_groups} groups of {group_size} hold fewer than the {top_k} experts a token needs; "
            f"it must be at least {-(-top_k // group_size)}",
        )
    return num_groups, topk_groups
