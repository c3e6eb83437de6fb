"""Rotary position embedding with YaRN, computed as Hugging Face transformers does it.

Knows nothing of attention: positions in, rotation out, and `rotate` turns pairs of dims by it.
A pair (a, b) is read as the complex number a + bi and multiplied by scale * e^(i * position * frequency), which is one
multiplication instead of a dozen small operations.

Letters: T tokens, P rope dim, P2 = P / 2 pairs.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import RopeConfig, YarnScaling
from .norm import wide

__all__ = ["Rotation", "angles", "rotate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """How far each pair of each token turns. Computed once a step, used by every layer."""

    turn_TP2: Tensor
    """complex64, or complex128 in a float64 run; its modulus is YaRN's table scale."""

    @property
    def cos_TP2(self) -> Tensor:
        return self.turn_TP2.real

    @property
    def sin_TP2(self) -> Tensor:
        return self.turn_TP2.imag


def angles(
    config: RopeConfig, dim: int, positions_T: Tensor, dtype: torch.dtype, *, last: int | None = None
) -> Rotation:
    """The rotation of tokens at `positions_T` (int64) for `dim` = P rotary dims, in the wide dtype of a `dtype` run.

    With `last`, the largest of the positions, it is looked up on a CPU, in a table that has twice the length whenever a
    position lies past its end: a sine is a call into another library, with threads of its own. A negative position,
    which is padding, turns as 0 does then.
    """
    if last is None:
        return Rotation(turn_TP2=_turns(config, dim, wide(dtype), positions_T))
    length = 1 << max(last, _SHORTEST_TABLE - 1).bit_length()
    return Rotation(turn_TP2=_table(config, dim, wide(dtype), length).index_select(0, positions_T.clamp(min=0)))


def rotate(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    """x [T, P] or [T, H, P] turned, in x's dtype and with the pairs where they were.

    Example, one pair turned by a right angle: (a, b) becomes (-b, a).
    """
    turn = rotation.turn_TP2 if x.dim() == 2 else rotation.turn_TP2.unsqueeze(1)
    x_wide = x.to(turn.real.dtype)
    if interleaved:
        turned = torch.complex(x_wide[..., 0::2], x_wide[..., 1::2]) * turn
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    turned = torch.complex(*x_wide.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


_SHORTEST_TABLE = 1024


@functools.lru_cache(maxsize=8)
def _table(config: RopeConfig, dim: int, dtype: torch.dtype, length: int) -> Tensor:
    """[length, P2] turns of all positions from 0 on."""
    with torch.inference_mode(False):
        return _turns(config, dim, dtype, torch.arange(length))


def _turns(config: RopeConfig, dim: int, dtype: torch.dtype, positions_T: Tensor) -> Tensor:
    frequencies_P2 = _frequencies(config, dim, dtype, positions_T.device)
    angles_TP2 = positions_T.to(frequencies_P2.dtype).unsqueeze(-1) * frequencies_P2
    scale = 1.0 if config.scaling is None else config.scaling.table_scale
    return torch.complex(angles_TP2.cos() * scale, angles_TP2.sin() * scale)


@functools.lru_cache(maxsize=64)
def _frequencies(config: RopeConfig, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position of each pair [P2]. The order of operations decides float32 bits, which long contexts see."""
    periods_P2 = config.theta ** (torch.arange(0, dim, 2, device=device).to(dtype) / dim)
    if config.scaling is None:
        return 1.0 / periods_P2
    kept_P2 = 1.0 - _ramp(config.scaling, config.theta, dim, dtype, device)
    slowed_P2 = 1.0 / (config.scaling.factor * periods_P2)
    return slowed_P2 * (1.0 - kept_P2) + (1.0 / periods_P2) * kept_P2


def _ramp(scaling: YarnScaling, theta: float, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 for pairs that keep their frequency, 1 for pairs slowed by the whole factor, linear in between [P2].

    pair    0 ........ low ~~~~~~~~ high ........ P2 - 1
    ramp    0          0   rising   1             1
    """

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    return ((torch.arange(dim // 2, device=device, dtype=dtype) - low) / (high - low)).clamp(0, 1)
