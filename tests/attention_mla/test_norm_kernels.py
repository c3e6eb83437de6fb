"""Residual, norm and quantisation in Triton's interpreter against the torch functions that the reference path uses."""

import pytest
import torch
from torch import Tensor

from attention_mla import rms_norm
from attention_mla.latent_rows import LatentRows, fp8_row_bytes
from attention_mla.norm_kernels import add_norm, add_norm_fp8

pytestmark = pytest.mark.interpret


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_docstrings_row_is_summed_and_normed():
    x, update, h = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.empty(1, 2)
    add_norm(x, update, torch.tensor([1.0, 2.0]), 0.0, sum_TD=x, h_TD=h)
    assert x.tolist() == [[3.0, 4.0]]
    assert h.flatten().tolist() == pytest.approx([0.848528, 2.262742], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 8), (1, 100), (5, 257)])
def test_rows_are_those_of_sum_and_norm(num_tokens: int, dim: int, dtype: torch.dtype):
    x_TD, update_TX = numbers(num_tokens, dim, dtype=dtype, seed=1), numbers(num_tokens, dim + 3, dtype=dtype, seed=2)
    weight_D = numbers(dim, dtype=dtype, seed=3)
    sum_TD, h_TD = (torch.full((num_tokens, dim), torch.nan, dtype=dtype) for _ in range(2))
    add_norm(x_TD, update_TX[:, 3:], weight_D, 1e-5, sum_TD=sum_TD, h_TD=h_TD)
    unit = torch.finfo(dtype).eps
    assert torch.allclose(sum_TD, x_TD + update_TX[:, 3:], rtol=unit, atol=0)
    assert torch.allclose(h_TD, rms_norm(sum_TD, weight_D, 1e-5), rtol=2 * unit, atol=2 * unit)


def test_without_an_update_rows_are_only_normed():
    x_TD, weight_D = numbers(3, 40, dtype=torch.float32, seed=1), numbers(40, dtype=torch.float32, seed=3)
    h_TD = torch.empty_like(x_TD)
    add_norm(x_TD, None, weight_D, 1e-5, sum_TD=None, h_TD=h_TD)
    assert torch.allclose(h_TD, rms_norm(x_TD, weight_D, 1e-5), rtol=1e-6, atol=1e-6)


def test_fp8_rows_and_scales_are_those_of_the_cache_format():
    x_TD, weight_D = numbers(5, 256, dtype=torch.float32, seed=1), numbers(256, dtype=torch.float32, seed=3)
    x_TD[2] = 0
    normed_TD, h_TD = torch.empty_like(x_TD), torch.empty(5, 256, dtype=torch.float8_e4m3fn)
    scales_TG = torch.full((5, 2), torch.nan)
    add_norm(x_TD, None, weight_D, 1e-5, sum_TD=None, h_TD=normed_TD)
    add_norm_fp8(x_TD, None, weight_D, 1e-5, sum_TD=None, h_TD=h_TD, scales_TG=scales_TG)
    rows = LatentRows.fp8(torch.zeros(5, fp8_row_bytes(256, 0), dtype=torch.uint8), rank=256, rope_dim=0)
    rows.write(normed_TD, torch.arange(5))
    assert torch.equal(h_TD.view(torch.uint8), rows.latents_NC.view(torch.uint8))
    assert torch.equal(scales_TG, rows.scales_NG)


def test_a_last_group_may_be_partial():
    x_TD, weight_D = numbers(2, 200, dtype=torch.float32, seed=1), torch.ones(200)
    h_TD, scales_TG = torch.empty(2, 200, dtype=torch.float8_e4m3fn), torch.full((2, 2), torch.nan)
    add_norm_fp8(x_TD, None, weight_D, 0.0, sum_TD=None, h_TD=h_TD, scales_TG=scales_TG)
    back_TD = h_TD.float() * scales_TG.repeat_interleave(128, dim=1)[:, :200]
    assert torch.allclose(back_TD, rms_norm(x_TD, weight_D, 0.0), rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_rows_in_fp8_are_ordinary(num_tokens: int):
    x_TD, weight_D = numbers(num_tokens, 130, dtype=torch.bfloat16, seed=1), torch.ones(130, dtype=torch.bfloat16)
    sum_TD, h_TD = torch.full_like(x_TD, torch.nan), torch.empty(num_tokens, 130, dtype=torch.float8_e4m3fn)
    scales_TG = torch.full((num_tokens, 2), torch.nan)
    add_norm_fp8(x_TD, x_TD, weight_D, 1e-5, sum_TD=sum_TD, h_TD=h_TD, scales_TG=scales_TG)
    assert torch.equal(sum_TD, x_TD + x_TD)
    back_TD = h_TD.float() * scales_TG.repeat_interleave(128, dim=1)[:, :130]
    assert torch.allclose(back_TD, rms_norm(sum_TD, weight_D, 1e-5).float(), rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch_mates(dtype: torch.dtype):
    x_TD, update_TD = numbers(5, 300, dtype=dtype, seed=1), numbers(5, 300, dtype=dtype, seed=2)
    weight_D = numbers(300, dtype=dtype, seed=3)

    def rows(part: slice) -> list[Tensor]:
        x, update = x_TD[part], update_TD[part]
        sums, plain = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        narrow = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
        scales = torch.full((x.shape[0], 3), torch.nan)
        add_norm(x, update, weight_D, 1e-5, sum_TD=sums, h_TD=plain)
        add_norm_fp8(x, update, weight_D, 1e-5, sum_TD=sums, h_TD=narrow, scales_TG=scales)
        return [sums, plain, narrow.view(torch.uint8), scales]

    for among, alone in zip(rows(slice(None)), rows(slice(3, 4)), strict=True):
        assert torch.equal(among[3], alone[0])
