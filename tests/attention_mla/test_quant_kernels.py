"""Rows to fp8 in Triton's interpreter, against the same in torch, bit for bit."""

import pytest
import torch
from torch import Tensor

from attention_mla.quant_kernels import quantise
from moe.quant import quantize_rows

pytestmark = pytest.mark.interpret

FP8 = torch.float8_e4m3fn


def quantised(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Over memory that was NaN."""
    num_tokens, dim = x_TD.shape
    values_TD = torch.full((num_tokens, dim), 0xFF, dtype=torch.uint8).view(FP8)
    scales_TG = torch.full((num_tokens, -(-dim // 128)), torch.nan)
    quantise(x_TD, values_TD=values_TD, scales_TG=scales_TG)
    return values_TD.view(torch.uint8), scales_TG


def test_the_docstrings_groups_come_out():
    x_TD = torch.zeros(1, 256)
    x_TD[0, :2], x_TD[0, 128:130] = torch.tensor([448.0, -224.0]), torch.tensor([1.0, 2.0])
    values, scales = quantised(x_TD)
    assert values.view(FP8).float()[0, [0, 1, 128, 129]].tolist() == [448, -224, 224, 448]
    assert scales.tolist() == [[1.0, pytest.approx(1 / 224)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 128), (1, 1), (3, 200), (2, 2304)])
def test_rows_are_those_of_torch(num_tokens: int, dim: int, dtype: torch.dtype):
    noise = torch.Generator().manual_seed(dim)
    wider_TX = torch.randn(num_tokens, dim + 3, generator=noise).to(dtype)
    x_TD = wider_TX[:, 3:]
    x_TD[num_tokens // 2 :][:1, :128] = 0  # a group of zeros
    values, scales = quantised(x_TD)
    wanted_values, wanted_scales = quantize_rows(x_TD)
    assert torch.equal(values, wanted_values.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_a_row_does_not_depend_on_its_batch_mates():
    x_TD = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    among, alone = quantised(x_TD), quantised(x_TD[3:4])
    assert torch.equal(among[0][3], alone[0][0])
    assert torch.equal(among[1][3], alone[1][0])
