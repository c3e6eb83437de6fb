"""Router: which experts a token visits and with which weights. Pure functions of tensors.

Knows logical experts only: not where a copy sits, not other ranks. Order of operations after DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 2.1.2) and DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.2.2).

Legend: T tokens here, D model, E experts, K top-k, Q groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ep import wide

from .config import MoeConfig

# Keeps the sum of picked weights away from zero, as the published routers do.
NORM_GUARD = 1e-20


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    experts_TK: Tensor
    """int64 logical experts, by descending selection score; equal scores by ascending id."""
    weights_TK: Tensor
    """Combine weights in the wide dtype, normalised and scaled as the config says."""


def route(x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor | None, config: MoeConfig) -> Routing:
    """Picks top_k experts a token; equal scores go to the lowest id at every step, groups included.

    The gate's matmul and everything after it run in the wide dtype of x; a gate that already has it is not copied.
    `bias_E` takes part in the choice of groups and experts, never in the weights. T may be 0.
    """
    dtype = wide(x_TD.dtype)
    scores_TE = _score(functional.linear(x_TD.to(dtype), gate_ED.to(dtype)), config)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(dtype)
    if config.is_group_limited:
        choice_TE = _shut_out_groups(choice_TE, config)
    experts_TK = top_ids(choice_TE, config.top_k)
    weights_TK = scores_TE.gather(1, experts_TK)
    if config.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + NORM_GUARD)
    return Routing(experts_TK, weights_TK * config.routed_scaling)


def top_ids(scores_TE: Tensor, num: int) -> Tensor:
    """int64 [T, num]: ids of the `num` largest scores of each row, largest first, equal ones by ascending id.

    torch.topk does not promise an order among equal scores. So on a CPU it is believed where the best of a row, and the
    first one left out, are all different; else, argmax promises the first, and `num` of them cost a quarter of a stable
    sort of 256 scores. A row needs `num` scores above -inf.

    [[.5, .9, .5, .9]], 3 -> [[1, 3, 0]]
    """
    if scores_TE.device.type == "cpu":
        best, ids = scores_TE.topk(min(num + 1, scores_TE.shape[1]), dim=1)
        if (best[:, :-1] > best[:, 1:]).all():
            return ids[:, :num]
    left_TE = scores_TE.clone()
    picked: list[Tensor] = []
    for _ in range(num):
        best_T1 = left_TE.argmax(dim=1, keepdim=True)
        left_TE.scatter_(1, best_T1, -torch.inf)
        picked.append(best_T1)
    return torch.cat(picked, dim=1)


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many (token, choice) pairs went to each expert; -1 is not counted.

    [[0, 2], [2, -1]], E = 4 -> [1, 0, 2, 0]
    """
    return torch.bincount(experts_TK.flatten() + 1, minlength=num_experts + 1)[1:]


def _score(logits_TE: Tensor, config: MoeConfig) -> Tensor:
    return logits_TE.sigmoid() if config.scoring == "sigmoid" else logits_TE.softmax(dim=1)


def _shut_out_groups(choice_TE: Tensor, config: MoeConfig) -> Tensor:
    """Scores with the experts of every group but the best `topk_groups` at -inf.

    The mask is -inf and not 0: a kept expert's biased score may be negative and must still win over a masked one.
    """
    choice_TQG = choice_TE.unflatten(1, (config.num_groups, config.num_experts // config.num_groups))
    kept_groups = top_ids(_score_groups(choice_TQG, config), config.topk_groups)
    shut_TQ = torch.ones(choice_TQG.shape[:2], dtype=torch.bool, device=choice_TE.device)
    shut_TQ.scatter_(1, kept_groups, False)
    return choice_TQG.masked_fill(shut_TQ.unsqueeze(2), -torch.inf).flatten(1)


def _score_groups(choice_TQG: Tensor, config: MoeConfig) -> Tensor:
    """[T, Q]: V3 adds the two best biased scores of a group, V2 takes its best score."""
    if config.method == "noaux_tc":
        return choice_TQG.topk(2, dim=2).values.sum(dim=2)
    return choice_TQG.amax(dim=2)
