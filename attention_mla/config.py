"""The numbers that define multi-head latent attention (MLA).

Knows nothing of config files: the runtime reads those and builds these dataclasses. Every derived number is a property,
so that a size or a scale has one home.

Letters: H heads, C latent rank, P rope dim. In this room N is the query/key part without rope, V the value head size
and Q = N + P.
"""

import math
from dataclasses import dataclass, fields

__all__ = ["GROUP", "MlaConfig", "RopeConfig", "YarnScaling", "fp8_row_bytes", "yarn_mscale"]

GROUP = 128
"""Latents of a row in fp8 that share a scale."""


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The logarithmic magnitude correction of YaRN: 0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    if factor <= 1.0:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Context stretching by YaRN (https://arxiv.org/abs/2309.00071), applied at any length once it is configured.

    Raises ValueError for a factor below 1, a window below 1, or betas that are not 0 < beta_slow <= beta_fast.
    """

    factor: float
    """How many times longer the served window is than the trained one."""
    original_max_position: int
    """The trained window, in tokens."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this over the trained window keep their frequency."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are slowed by the whole factor."""
    mscale: float | None = None
    """None where the file lacks the key; 0 reads the same."""
    mscale_all_dim: float | None = None
    """None where the file lacks the key; 0 reads the same."""

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ValueError(
                f"factor = {self.factor}: YaRN stretches, so the factor is at least 1 (1.0 changes nothing)"
            )
        if self.original_max_position < 1:
            raise ValueError(f"original_max_position = {self.original_max_position}: a window has at least 1 token")
        if not 0.0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow = {self.beta_slow}: must be above 0 and at most beta_fast = {self.beta_fast} "
                f"(usual: beta_slow = 1, beta_fast = 32)"
            )

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by. Both mscale keys are needed for anything but the plain logarithm."""
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by on top of 1/sqrt(Q). Without mscale_all_dim nothing."""
        if self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale_all_dim) ** 2
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Raises ValueError for a base that is not above 1."""

    theta: float
    """The base of the frequencies."""
    interleaved: bool = True
    """Whether dims (2i, 2i+1) turn together; otherwise (i, i + P/2) do."""
    scaling: YarnScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 1.0:
            raise ValueError(f"theta = {self.theta}: the base must be above 1 (usual: 10000.0)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Sizes of one MLA block. Raises ValueError for a size below 1, an odd rope size or a negative eps."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """None: queries come straight from the hidden state, without a low-rank step."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    latent_norm_eps: float = 1e-6
    """Of the norms on the query and key/value latents; the model's own rms_norm_eps does not reach them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} = {value}: sizes are at least 1")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim = {self.qk_rope_head_dim}: rotary dims turn in pairs, so the size is even "
                f"({self.qk_rope_head_dim + 1} would do)"
            )
        if not self.latent_norm_eps >= 0.0:
            raise ValueError(f"latent_norm_eps = {self.latent_norm_eps}: must not be negative (usual: 1e-06)")

    @property
    def qk_head_dim(self) -> int:
        """Q = N + P: what queries and keys of one head measure."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """C + P: what the cache keeps for one token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by before the softmax: 1/sqrt(Q), times YaRN's correction."""
        plain = self.qk_head_dim**-0.5
        return plain if self.rope.scaling is None else plain * self.rope.scaling.score_scale


def fp8_row_bytes(rank: int, rope_dim: int) -> int:
    """Bytes of one token in one layer. `rank` must be a multiple of 128."""
    assert rank % GROUP == 0, f"a latent of {rank} does not fill groups of {GROUP}"
    return rank + 4 * (rank // GROUP) + 2 * rope_dim
