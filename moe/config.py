"""The numbers that define one mixture-of-experts layer.

Knows the mathematics a checkpoint asks for and refuses what this room has no implementation of. It does not know
file formats, ranks or where experts sit.

Legend: D model, E experts, F expert hidden, K top-k.
"""

import math
from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
Method = Literal["greedy", "group_limited_greedy", "noaux_tc"]

# What each selection method is computed on. Other pairs have no published model and no oracle.
SCORING_OF_METHOD: dict[str, str] = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """One MoE layer's sizes and router. Raises ValueError naming the field, its value, the rule and what is legal."""

    hidden_size: int
    """D."""
    intermediate_size: int
    """F, of one routed expert."""
    num_experts: int
    """E, routed experts."""
    top_k: int
    """K, routed experts a token visits."""
    num_shared: int = 0
    """Shared experts, fused into one MLP of width num_shared * F; 0 means no shared expert."""
    scoring: Scoring
    """softmax (V2) or sigmoid (V3)."""
    method: Method
    """greedy: no groups; group_limited_greedy: groups by their maximum; noaux_tc: bias, groups by their top two."""
    num_groups: int = 1
    """Groups the experts are split into, in id order. Has no effect under greedy."""
    topk_groups: int = 1
    """Groups a token may pick from."""
    norm_topk_prob: bool = False
    """Divide the picked weights by their sum before scaling."""
    routed_scaling: float = 1.0
    """Factor on the routed experts' weights (the shared expert is not scaled)."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_router(self)
        _check_groups(self)

    @property
    def has_bias(self) -> bool:
        """Whether the router carries a correction bias that takes part in selection only."""
        return self.method == "noaux_tc"

    @property
    def is_group_limited(self) -> bool:
        """Whether some group is shut out for every token; with all groups kept the group steps vanish."""
        return self.method != "greedy" and self.topk_groups < self.num_groups

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden width of the fused shared expert, 0 without one."""
        return self.num_shared * self.intermediate_size


def _check_sizes(config: MoeConfig) -> None:
    for field in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "topk_groups"):
        value = getattr(config, field)
        if value < 1:
            raise ValueError(f"{field} {value} must be at least 1")
    if config.num_shared < 0:
        raise ValueError(f"num_shared {config.num_shared} must be at least 0 (0 means no shared expert)")
    if config.top_k > config.num_experts:
        raise ValueError(f"top_k {config.top_k} must be at most num_experts {config.num_experts}")
    if not (math.isfinite(config.routed_scaling) and config.routed_scaling > 0):
        raise ValueError(f"routed_scaling {config.routed_scaling} must be a finite number above 0, such as 1.0")


def _check_router(config: MoeConfig) -> None:
    if config.method not in SCORING_OF_METHOD:
        raise ValueError(f"method {config.method!r} is not implemented: one of {', '.join(SCORING_OF_METHOD)}")
    if config.scoring not in SCORING_OF_METHOD.values():
        raise ValueError(f"scoring {config.scoring!r} is not implemented: one of softmax, sigmoid")
    wanted = SCORING_OF_METHOD[config.method]
    if config.scoring != wanted:
        raise ValueError(f"scoring {config.scoring!r} does not go with method {config.method!r}: it needs {wanted!r}")
    if config.norm_topk_prob and config.scoring == "softmax":
        # DeepSeek's V2 code then normalises and does not scale, transformers ignores the field: there is no one truth.
        raise ValueError("norm_topk_prob True has no agreed meaning with scoring 'softmax': it must be False")


def _check_groups(config: MoeConfig) -> None:
    if config.method == "greedy":
        return
    if config.num_experts % config.num_groups:
        legal = _nearest_divisor(config.num_experts, config.num_groups)
        raise ValueError(f"num_groups {config.num_groups} must divide num_experts {config.num_experts}: {legal} would")
    if config.topk_groups > config.num_groups:
        raise ValueError(f"topk_groups {config.topk_groups} must be at most num_groups {config.num_groups}")
    group_size = config.num_experts // config.num_groups
    if config.is_group_limited and config.method == "noaux_tc" and group_size < 2:
        legal = _nearest_divisor(config.num_experts, config.num_experts // 2)
        raise ValueError(
            f"num_groups {config.num_groups} leaves 1 expert a group, the group score needs 2: {legal} would do"
        )
    if config.topk_groups * group_size < config.top_k:
        legal = -(-config.top_k // group_size)
        raise ValueError(
            f"topk_groups {config.topk_groups} x {group_size} experts a group cannot hold top_k {config.top_k}: "
            f"at least {legal}"
        )


def _nearest_divisor(total: int, near: int) -> int:
    """The divisor of `total` closest to `near`, the smaller one on a tie: _nearest_divisor(64, 7) -> 8."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    return min(divisors, key=lambda n: abs(n - near))
