"""Rotary tables bit for bit as transformers makes them, and rotation against complex numbers written out in a loop."""

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from attention_mla import RopeConfig, Rotation, YarnScaling, angles, rotate

AssertNear = Callable[[Tensor, Tensor, float], None]
POSITIONS = torch.tensor([0, 1, 2, 63, 64, 4095, 4096, 4097, 100_003])

YARNS = [
    pytest.param(10000.0, None, id="no-scaling"),
    pytest.param(10000.0, {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, id="deepseek-v3"),
    pytest.param(10000.0, {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}, id="deepseek-v2"),
    pytest.param(
        50000.0,
        {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        id="kimi-k2",
    ),
    pytest.param(50000.0, {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}, id="kimi-k2.5"),
    pytest.param(1e6, {"factor": 4.0, "mscale": 0.5, "mscale_all_dim": 1.5}, id="unequal-mscales"),
    pytest.param(1e6, {"factor": 4.0, "mscale": 0.5}, id="mscale-alone"),
    pytest.param(1e6, {"factor": 4.0, "mscale_all_dim": 0.5}, id="mscale_all_dim-alone"),
    pytest.param(1e6, {"factor": 4.0}, id="no-mscales"),
    pytest.param(10.0, {"factor": 4.0, "original": 8, "beta_fast": 64.0}, id="ramp-clamped-at-both-ends"),
    pytest.param(1e4, {"factor": 4.0, "original": 6}, id="ramp-without-length"),
]


def scaling_of(keys: dict[str, Any] | None) -> YarnScaling | None:
    if keys is None:
        return None
    rest = {key: value for key, value in keys.items() if key != "original"}
    return YarnScaling(original_max_position=keys.get("original", 4096), **rest)


@pytest.mark.parametrize("dim", [2, 6, 64])
@pytest.mark.parametrize(("theta", "keys"), YARNS)
def test_float32_tables_have_the_bits_of_transformers(
    dim: int, theta: float, keys: dict[str, Any] | None, rope_keys: Callable[[RopeConfig], dict[str, Any]]
) -> None:
    config = RopeConfig(theta=theta, scaling=scaling_of(keys))
    reference = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(qk_rope_head_dim=dim, max_position_embeddings=163840, rope_parameters=rope_keys(config))
    )
    cos, sin = reference(torch.zeros(1), POSITIONS.unsqueeze(0))

    rotation = angles(config, dim, POSITIONS, torch.bfloat16)

    assert torch.equal(rotation.cos_TP2, cos[0, :, : dim // 2])
    assert torch.equal(rotation.sin_TP2, sin[0, :, : dim // 2])


@pytest.mark.parametrize(("theta", "keys"), YARNS)
def test_float64_tables_are_float64_from_the_first_operation(
    theta: float, keys: dict[str, Any] | None, assert_near: AssertNear
) -> None:
    dim = 64
    rotation = angles(RopeConfig(theta=theta, scaling=scaling_of(keys)), dim, POSITIONS, torch.float64)
    expected = [[scalar_turn(theta, keys, dim, pair, int(p)) for pair in range(dim // 2)] for p in POSITIONS]
    turn_TP2 = torch.tensor(expected, dtype=torch.complex128)
    assert_near(rotation.cos_TP2, turn_TP2.real, 1e-10)  # 1e-16 times 100,003 radians
    assert_near(rotation.sin_TP2, turn_TP2.imag, 1e-10)


def scalar_turn(theta: float, keys: dict[str, Any] | None, dim: int, pair: int, position: int) -> complex:
    """YaRN for one pair and one position, in Python's floats."""
    frequency = theta ** (-2 * pair / dim)
    if keys is None:
        return cmath.exp(1j * position * frequency)
    betas = (keys.get("beta_fast", 32), keys.get("beta_slow", 1))
    original, factor = keys.get("original", 4096), keys["factor"]
    low, high = (dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in betas)
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    high = high + 0.001 if low == high else high
    slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
    frequency = frequency * (1 - slowed) + frequency / factor * slowed
    mscales = (keys.get("mscale"), keys.get("mscale_all_dim"))
    logarithm = 0.1 * math.log(factor)
    scale = 1 + logarithm
    if mscales[0] and mscales[1]:
        scale = (1 + logarithm * mscales[0]) / (1 + logarithm * mscales[1])
    return scale * cmath.exp(1j * position * frequency)


@pytest.mark.parametrize(
    ("theta", "factor", "beta_fast", "last_kept", "first_slowed"),
    [(1e4, 40.0, 32.0, 10, 23), (5e4, 64.0, 32.0, 8, 20), (5e4, 32.0, 1.0, 19, 20)],
    ids=["deepseek", "kimi-k2.5", "kimi-k2"],
)
def test_ramp_lies_where_it_is_published(
    theta: float, factor: float, beta_fast: float, last_kept: int, first_slowed: int
) -> None:
    yarn = YarnScaling(factor=factor, original_max_position=4096, beta_fast=beta_fast)
    one = torch.tensor([1])
    plain = angles(RopeConfig(theta=theta), 64, one, torch.float64).turn_TP2[0].angle()
    ratio = angles(RopeConfig(theta=theta, scaling=yarn), 64, one, torch.float64).turn_TP2[0].angle() / plain
    kept = (ratio - 1.0).abs() < 1e-9
    slowed = (ratio * factor - 1.0).abs() < 1e-9
    assert kept.tolist() == [pair <= last_kept for pair in range(32)]
    assert slowed.tolist() == [pair >= first_slowed for pair in range(32)]


def test_right_angle_turns_each_pair_where_it_stands() -> None:
    quarter = Rotation(turn_TP2=torch.tensor([[1j, 1j]], dtype=torch.complex128))
    x_TP = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert rotate(x_TP, quarter, interleaved=True).tolist() == [[-2.0, 1.0, -4.0, 3.0]]
    assert rotate(x_TP, quarter, interleaved=False).tolist() == [[-3.0, -4.0, 1.0, 2.0]]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize("positions", [[], [7], [0, 7, 4097]])
def test_rotation_is_complex_multiplication(
    positions: list[int], heads: int | None, interleaved: bool, assert_near: AssertNear
) -> None:
    positions_T = torch.tensor(positions, dtype=torch.int64)
    rotation = angles(RopeConfig(theta=100.0), 6, positions_T, torch.float64)
    whole = torch.randn(len(positions), *([] if heads is None else [heads]), 11, dtype=torch.float64)
    x = whole[..., 5:]  # an odd offset and stride, as in a slice behind an odd head size
    expected = x.clone()
    for token, turn_P2 in enumerate(rotation.turn_TP2.tolist()):
        for pair, turn in enumerate(turn_P2):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
            turned = torch.complex(x[token, ..., first], x[token, ..., second]) * turn
            expected[token, ..., first], expected[token, ..., second] = turned.real, turned.imag
    assert_near(rotate(x, rotation, interleaved), expected, 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_bit_values_turn_in_float32(dtype: torch.dtype) -> None:
    rotation = angles(RopeConfig(theta=100.0), 6, torch.arange(5), dtype)
    x_THP = torch.randn(5, 2, 6).to(dtype)
    assert rotation.turn_TP2.dtype is torch.complex64
    assert torch.equal(rotate(x_THP, rotation, True), rotate(x_THP.float(), rotation, True).to(dtype))


def test_no_tokens_turn_into_no_tokens() -> None:
    rotation = angles(RopeConfig(theta=100.0), 6, torch.arange(0), torch.float32)
    assert rotate(torch.zeros(0, 2, 6), rotation, True).shape == (0, 2, 6)
    assert rotate(torch.zeros(0, 6), rotation, False).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_turns_that_are_looked_up_are_those_that_are_computed(dtype):
    config = RopeConfig(theta=10000.0)
    for positions in ([], [0], [5, 1023, 3], [1024, 7], [9000, 2, 2]):
        positions_T = torch.tensor(positions, dtype=torch.int64)
        found = angles(config, 64, positions_T, dtype, last=max(positions, default=0)).turn_TP2
        torch.testing.assert_close(found, angles(config, 64, positions_T, dtype).turn_TP2, rtol=0, atol=1e-6)
    padded = angles(config, 64, torch.tensor([-1, 0]), dtype, last=0).turn_TP2
    assert torch.equal(padded[0], padded[1])
