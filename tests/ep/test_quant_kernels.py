"""Rows in fp8 in Triton's interpreter against torch, bit for bit."""

import pytest
import torch
from torch import Tensor

from ep.quant_kernels import quantize_rows
from moe import quant

pytestmark = pytest.mark.interpret


def rows(num_rows: int, width: int) -> Tensor:
    """From tiny to large, with a row of zeros."""
    x_ND = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width))
    x_ND *= torch.logspace(-7, 4, num_rows).unsqueeze(1)
    x_ND[num_rows // 2 :][:1] = 0
    return x_ND


def quantized(x_ND: Tensor, **how) -> tuple[Tensor, Tensor]:
    num_rows, width = x_ND.shape
    q_ND = torch.full((num_rows, width), torch.nan).to(torch.float8_e4m3fn)
    scale_Nd = torch.full((num_rows, -(-width // how.get("block", 128))), torch.nan)
    quantize_rows(x_ND, q_ND, scale_Nd, **how)
    return q_ND, scale_Nd


def test_the_docstrings_row_is_quantised():
    q_ND, scale_Nd = quantized(torch.tensor([[448.0, -224.0, 1.0, 2.0]]), block=2)
    assert q_ND.float().tolist() == [[448, -224, 224, 448]]
    assert scale_Nd[0].tolist() == pytest.approx([1, 1 / 224])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 64), (1, 1), (13, 300), (2, 1100)])
def test_values_and_scales_are_those_of_torch(num_rows, width, dtype, power_of_two):
    x_ND = rows(num_rows, width).to(dtype)
    q_ND, scale_Nd = quantized(x_ND, power_of_two=power_of_two)
    expected_q, expected_scale = quant.quantize_rows(x_ND, power_of_two=power_of_two)
    assert torch.equal(scale_Nd, expected_scale)
    assert torch.equal(q_ND.view(torch.uint8), expected_q.view(torch.uint8))


def test_rows_without_a_place_are_left_alone():
    x_ND = rows(4, 130)
    x_ND[1] = torch.nan
    q_ND, scale_Nd = quantized(
        x_ND, places_NK=torch.tensor([[0, -1, 3], [-1, -1, -1], [-1, 7, -1], [-1, -1, -1]]).int()
    )
    expected_q, expected_scale = quant.quantize_rows(x_ND)
    for row in (0, 2):
        assert torch.equal(scale_Nd[row], expected_scale[row])
        assert torch.equal(q_ND[row].view(torch.uint8), expected_q[row].view(torch.uint8))
    assert scale_Nd[[1, 3]].isnan().all()
