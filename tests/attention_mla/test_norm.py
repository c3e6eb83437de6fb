"""The norm has transformers' bits, and float64 is never narrowed."""

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from attention_mla import rms_norm, wide


@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (5, 3, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm_has_the_bits_of_transformers(shape: tuple[int, ...], dtype: torch.dtype, eps: float) -> None:
    reference = DeepseekV3RMSNorm(shape[-1], eps=eps).to(dtype)
    reference.weight.copy_(torch.randn(shape[-1]))
    x = torch.randn(shape).to(dtype)
    assert torch.equal(rms_norm(x, reference.weight, eps), reference(x))


def test_float64_norm_is_float64() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 10.0], dtype=torch.float64)
    root = (12.5 + 1e-6) ** 0.5
    expected = torch.tensor([[3.0 / root, 40.0 / root]], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, rtol=1e-15, atol=0.0)


def test_weight_of_another_dtype_does_not_change_the_dtype() -> None:
    assert rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), 1e-6).dtype is torch.bfloat16


def test_only_float64_is_wider_than_float32() -> None:
    assert wide(torch.float64) is torch.float64
    assert {wide(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)} == {torch.float32}
