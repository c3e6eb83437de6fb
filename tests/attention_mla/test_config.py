"""Sizes and scales: published values, missing keys, and refusals that name what would be allowed."""

from dataclasses import replace

import pytest

from attention_mla import MlaConfig, RopeConfig, Tiling, YarnScaling


def published(nope: int, yarn: YarnScaling | None) -> MlaConfig:
    return MlaConfig(
        hidden_size=7168,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RopeConfig(theta=10000.0, scaling=yarn),
    )


def yarn(factor: float, mscale: float | None, mscale_all_dim: float | None) -> YarnScaling:
    return YarnScaling(factor=factor, original_max_position=4096, mscale=mscale, mscale_all_dim=mscale_all_dim)


@pytest.mark.parametrize(
    ("nope", "scaling", "expected"),
    [
        pytest.param(128, yarn(40, 1.0, 1.0), 0.135234, id="deepseek-v3"),
        pytest.param(128, yarn(40, 0.707, 0.707), 0.114721, id="deepseek-v2"),
        pytest.param(128, yarn(32, 1.0, 1.0), 0.130861, id="kimi-k2"),
        pytest.param(128, yarn(64, 1.0, 1.0), 0.144680, id="kimi-k2.5"),
        pytest.param(192, None, 0.0625, id="glm-4.7-flash"),
        pytest.param(128, None, 0.0721688, id="moonlight"),
        pytest.param(128, yarn(40, 1.0, None), 0.0721688, id="without-mscale_all_dim"),
        pytest.param(128, yarn(1.0, 1.0, 1.0), 0.0721688, id="factor-one"),
    ],
)
def test_softmax_scale_is_the_published_one(nope: int, scaling: YarnScaling | None, expected: float) -> None:
    assert published(nope, scaling).softmax_scale == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "expected"),
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (2.0, 1.0, 1.7377758908227871 / 1.3688879454113936),
        (None, 1.0, 1.3688879454113936),
        (1.0, None, 1.3688879454113936),
        (0.0, 1.0, 1.3688879454113936),
        (None, None, 1.3688879454113936),
    ],
)
def test_table_scale_needs_both_mscale_keys(
    mscale: float | None, mscale_all_dim: float | None, expected: float
) -> None:
    assert yarn(40, mscale, mscale_all_dim).table_scale == pytest.approx(expected, rel=1e-14)


def test_widths_follow_from_the_parts(small_config: MlaConfig) -> None:
    assert (small_config.qk_head_dim, small_config.latent_width) == (7 + 6, 12 + 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, r"num_heads = 0: .*at least 1"),
        ({"q_lora_rank": -3}, r"q_lora_rank = -3: .*at least 1"),
        ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim = 7: .*even \(8 would do\)"),
        ({"latent_norm_eps": -1e-6}, r"latent_norm_eps = -1e-06"),
        ({"latent_norm_eps": float("nan")}, r"latent_norm_eps = nan"),
    ],
)
def test_impossible_sizes_are_refused(small_config: MlaConfig, changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small_config, **changes)


def test_impossible_rope_is_refused() -> None:
    with pytest.raises(ValueError, match=r"theta = 1\.0: .*above 1"):
        RopeConfig(theta=1.0)
    with pytest.raises(ValueError, match=r"factor = 0\.5: .*at least 1"):
        YarnScaling(factor=0.5, original_max_position=4096)
    with pytest.raises(ValueError, match=r"original_max_position = 0"):
        YarnScaling(factor=4.0, original_max_position=0)
    with pytest.raises(ValueError, match=r"beta_slow = 2\.0: .*at most beta_fast = 1\.0"):
        YarnScaling(factor=4.0, original_max_position=4096, beta_fast=1.0, beta_slow=2.0)


def test_equal_betas_are_legal_as_in_kimi_k2() -> None:
    assert YarnScaling(factor=32.0, original_max_position=4096, beta_fast=1.0, beta_slow=1.0).beta_slow == 1.0


def test_empty_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"split_tokens = 0: must be at least 1 \(usual: 256\)"):
        Tiling(split_tokens=0)
