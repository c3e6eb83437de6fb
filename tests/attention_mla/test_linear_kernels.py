"""The fp8 matmul in Triton's interpreter against one float64 matmul of what the blocks stand for."""

import pytest
import torch

from attention_mla.linear_kernels import fp8_linear
from attention_mla.matrix import linear_blocks

pytestmark = pytest.mark.interpret

FP8 = torch.float8_e4m3fn


def random_operands(num_tokens: int, num_outputs: int, dim: int) -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(num_tokens)
    x_TD = (torch.randn(num_tokens, dim, generator=noise) * 100).to(FP8)
    weight_ND = (torch.randn(num_outputs, dim, generator=noise) * 100).to(FP8)
    blocks = -(-dim // 128)
    scales = [torch.rand(n, blocks, generator=noise) + 0.01 for n in (num_tokens, -(-num_outputs // 128))]
    return x_TD, scales[0], weight_ND, scales[1]


def test_the_docstrings_product_comes_out():
    x, weight = torch.tensor([[3.0, 4.0]]).to(FP8), torch.tensor([[1.0, 2.0]]).to(FP8)
    out = torch.full((1, 1), torch.nan)
    fp8_linear(x, torch.tensor([[0.5]]), weight, torch.tensor([[10.0]]), out_TN=out)
    assert out.item() == 55.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_outputs", "dim"), [(0, 130, 128), (1, 130, 200), (65, 300, 384)])
def test_products_are_those_of_the_widened_operands(num_tokens: int, num_outputs: int, dim: int, dtype: torch.dtype):
    operands = random_operands(num_tokens, num_outputs, dim)
    out_TN = torch.full((num_tokens, num_outputs), torch.nan, dtype=dtype)
    fp8_linear(*operands, out_TN=out_TN)
    wanted = linear_blocks(*operands)
    largest = wanted.abs().amax(dim=1, keepdim=True) if num_tokens else wanted
    assert bool(((out_TN.double() - wanted).abs() <= 2 * max(torch.finfo(dtype).eps, 2**-20) * largest).all())


def test_a_row_does_not_depend_on_its_batch_mates():
    operands = random_operands(70, 130, 256)
    alone, among = torch.empty(1, 130), torch.empty(70, 130)
    fp8_linear(*operands, out_TN=among)
    fp8_linear(operands[0][66:67].contiguous(), operands[1][66:67].contiguous(), *operands[2:], out_TN=alone)
    assert torch.equal(alone[0], among[66])
