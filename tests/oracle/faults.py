"""Mistakes that ports of these models really made, planted in the oracle's model: name -> what it does to it.

They show that a checkpoint can tell a right decode from a wrong one: a family whose tokens stay the same under a fault
proves nothing about that rule. Faults of routing are one router written out with its rules as arguments; with every
rule right it must equal transformers' own (test_checkpoints.py holds it to that).

T tokens  E experts  G groups  K top-k
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel


def route(
    gate: nn.Module,
    x_TD: Tensor,
    *,
    use_bias: bool = True,
    limit_groups: bool = True,
    group_width: int | None = None,
    masked_score: float = float("-inf"),
    weigh_biased: bool = False,
    flip_normalise: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, E], weights [T, K], experts [T, K]) by the family's rules, unless an argument says otherwise."""
    logits_TE = linear(x_TD.reshape(-1, gate.hidden_dim).float(), gate.weight.float())
    sigmoid = hasattr(gate, "e_score_correction_bias")
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(dim=-1)
    choice_TE = scores_TE + gate.e_score_correction_bias if sigmoid and use_bias else scores_TE
    if limit_groups and (gate.num_group or 1) > 1:
        choice_TGE = choice_TE.unflatten(-1, (gate.num_group, -1))
        width = group_width or (2 if sigmoid else 1)
        best_TG = choice_TGE.topk(width).values.sum(dim=-1).topk(gate.topk_group).indices
        kept_TG = torch.zeros(choice_TGE.shape[:2], dtype=torch.bool).scatter_(-1, best_TG, True)
        choice_TE = choice_TGE.masked_fill(~kept_TG[..., None], masked_score).flatten(-2)
    experts_TK = choice_TE.topk(gate.top_k, sorted=False).indices
    weights_TK = (choice_TE if weigh_biased else scores_TE).gather(1, experts_TK)
    if getattr(gate, "norm_topk_prob", False) != flip_normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return logits_TE, weights_TK * gate.routed_scaling_factor, experts_TK


def reroute(model: PreTrainedModel, **rules: object) -> None:
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.forward = partial(route, module, **rules)


def set_on(model: PreTrainedModel, suffix: str, **attributes: object) -> None:
    """Set attributes of every module whose name ends in `suffix`; at least one must be there."""
    found = [module for name, module in model.named_modules() if name.endswith(suffix)]
    assert found, f"no module ends in {suffix!r}"
    for module in found:
        for key, value in attributes.items():
            assert hasattr(module, key), f"{suffix} has no {key}"
            setattr(module, key, value)


def plain_scale(model: PreTrainedModel) -> float:
    return (model.config.qk_nope_head_dim + model.config.qk_rope_head_dim) ** -0.5


def drop_shared_experts(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("shared_experts.down_proj.weight"):
            parameter.data.zero_()


def unscale_frequencies(model: PreTrainedModel) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]


def swap_rotary_pairs(model: PreTrainedModel) -> None:
    model.config.rope_interleave = not model.config.rope_interleave


def square_mscale(model: PreTrainedModel) -> None:
    factor = model.model.rotary_emb.attention_scaling
    set_on(model, "self_attn", scaling=plain_scale(model) * factor**2)


def shift_half_the_positions(model: PreTrainedModel) -> None:
    """Positions from the middle on are one too high, as after a chunk that counted one token twice."""
    forward = model.model.rotary_emb.forward

    def shifted(x: Tensor, position_ids: Tensor) -> object:
        return forward(x, position_ids + (position_ids >= position_ids.shape[-1] // 2))

    model.model.rotary_emb.forward = shifted


FAULTS: dict[str, Callable[[PreTrainedModel], None]] = {
    "no routed scaling": lambda model: set_on(model, "mlp.gate", routed_scaling_factor=1.0),
    "no correction bias": lambda model: reroute(model, use_bias=False),
    "biased weights": lambda model: reroute(model, weigh_biased=True),
    "weights not normalised": lambda model: reroute(model, flip_normalise=True),
    "normalised weights": lambda model: reroute(model, flip_normalise=True),
    "no group limit": lambda model: reroute(model, limit_groups=False),
    "group score of one": lambda model: reroute(model, group_width=1),
    "group score of two": lambda model: reroute(model, group_width=2),
    "masked groups score 0": lambda model: reroute(model, masked_score=0.0),
    "no shared experts": drop_shared_experts,
    "plain softmax scale": lambda model: set_on(model, "self_attn", scaling=plain_scale(model)),
    "squared mscale in the softmax scale": square_mscale,
    "cos and sin unscaled": lambda model: set_on(model, "rotary_emb", attention_scaling=1.0),
    "unscaled frequencies": unscale_frequencies,
    "rotary pairs the other way": swap_rotary_pairs,
    "positions shifted": shift_half_the_positions,
    "latent norms take rms_norm_eps": lambda model: set_on(
        model, "_a_layernorm", variance_epsilon=model.config.rms_norm_eps
    ),
}
