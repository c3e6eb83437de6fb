"""FP8 blocks and rows against loops over single values."""

import pytest
import torch

from moe.quant import FP8, dequantize_blocks, dequantize_rows, num_blocks, quantize_blocks, quantize_rows


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_dequantised_blocks_written_out_by_hand() -> None:
    """Blocks of 2 x 2 on a 3 x 5 matrix: the last row and the last column are blocks of their own."""
    q = torch.tensor([[1, 2, 1, 1, 4], [1, 1, 1, 2, 1], [2, 1, 1, 1, 1]], dtype=torch.float32).to(FP8)
    scale_inv = torch.tensor([[1.0, 10.0, 100.0], [0.5, 0.25, 2.0]])
    expected = [[1, 2, 10, 10, 400], [1, 1, 10, 20, 100], [1, 0.5, 0.25, 0.25, 2]]
    assert dequantize_blocks(q, scale_inv, torch.float32, block=2).tolist() == expected


@pytest.mark.parametrize("shape", [(128, 128), (576, 130), (1, 1), (127, 257), (2, 200, 96)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_value_is_multiplied_by_its_own_blocks_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, scale_inv = quantize_blocks(draw(*shape))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = dequantize_blocks(q, scale_inv, dtype)
    rows, columns = torch.arange(shape[-2]) // 128, torch.arange(shape[-1]) // 128
    expected = q.to(wide) * scale_inv.to(wide)[..., rows.unsqueeze(1), columns]
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (3, 130, 40)])
def test_a_round_trip_stays_within_half_a_step_of_fp8(shape: tuple[int, ...]) -> None:
    w = draw(*shape, seed=5)
    q, scale_inv = quantize_blocks(w)
    assert q.dtype == FP8
    assert scale_inv.shape == (*shape[:-2], num_blocks(shape[-2]), num_blocks(shape[-1]))
    error = (dequantize_blocks(q, scale_inv, torch.float32) - w).abs()
    # 3 bits of mantissa: half a step is 2**-4 of the value, below 2**-6 a fixed 2**-10 of the scale
    step = torch.maximum(w.abs() * 2**-4, scale_inv.max() * 2**-10)
    assert (error <= step * (1 + 1e-5)).all()


def test_a_block_of_zeros_and_zero_columns_are_ordinary() -> None:
    q, scale_inv = quantize_blocks(torch.zeros(130, 5))
    assert scale_inv.tolist() == [[1.0], [1.0]]
    assert not dequantize_blocks(q, scale_inv, torch.float32).any()
    assert dequantize_blocks(torch.empty(0, 5).to(FP8), torch.empty(0, 1), torch.float32).shape == (0, 5)


def test_scales_of_another_shape_are_refused() -> None:
    q, scale_inv = quantize_blocks(draw(130, 130))
    with pytest.raises(AssertionError, match=r"scales \(1, 2\) for fp8 \(130, 130\), want \(2, 2\)"):
        dequantize_blocks(q, scale_inv[:1], torch.float32)


def test_the_largest_value_of_a_row_lands_on_the_largest_fp8() -> None:
    x_TD = draw(7, 300, seed=2) * 100
    q_TD, scale = quantize_rows(x_TD)
    assert scale.shape == (7, 3)
    for row in range(7):
        for block in range(3):
            part = slice(block * 128, (block + 1) * 128)
            assert scale[row, block] == x_TD[row, part].abs().max() / 448
            assert q_TD[row, part].float().abs().max() == 448
    error = (dequantize_rows(q_TD, scale, torch.float32) - x_TD).abs()
    assert (error <= x_TD.abs() * 2**-4 + scale.max() * 2**-10).all()


def test_tiny_rows_share_one_floor_and_stay_finite() -> None:
    q_TD, scale = quantize_rows(torch.tensor([[0.0] * 8, [1e-6] * 8]))
    assert (scale == torch.tensor(1e-4) / 448).all()
    assert dequantize_rows(q_TD, scale, torch.float32).isfinite().all()
    assert quantize_rows(torch.empty(0, 8))[0].shape == (0, 8)


def test_power_of_two_scales_are_rounded_up_and_no_further() -> None:
    x_TD = torch.cat([draw(64, 256, seed=3), torch.full((1, 256), 448.0 / 8)])
    _, plain = quantize_rows(x_TD)
    q_TD, rounded = quantize_rows(x_TD, power_of_two=True)
    assert torch.equal(rounded, torch.exp2(rounded.log2().round()))
    assert ((rounded >= plain) & (rounded < 2 * plain)).all()
    assert rounded[-1].tolist() == [0.125, 0.125]
    assert q_TD.float().abs().max() <= 448
