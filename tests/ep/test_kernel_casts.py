"""Narrowing in Triton's interpreter against torch, over the range of the format, its ties and its smallest numbers."""

import pytest
import torch
import triton
import triton.language as tl

from ep.kernel_casts import narrow

pytestmark = pytest.mark.interpret


@triton.jit
def narrow_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n)
    tl.store(out_ptr + place, narrow(x, out_ptr.dtype.element_ty, True), mask=place < n)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.shape[0], dtype=torch.float32).to(dtype)
    narrow_kernel[(1,)](x, out, x.shape[0], BLOCK=triton.next_power_of_2(x.shape[0]))
    return out


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8 if values.dtype.itemsize == 1 else torch.int16)


def test_the_docstrings_ties_go_to_the_even_neighbour():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert narrowed(x, torch.bfloat16).tolist() == [1.0, 1.015625]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16], ids=str)
def test_every_number_and_the_middle_of_any_two_are_rounded_as_torch_rounds(dtype):
    """All 256 of fp8; of 16-bit formats every 37th."""
    whole = torch.int8 if dtype.itemsize == 1 else torch.int16
    step = 1 if dtype.itemsize == 1 else 37
    numbers = torch.arange(torch.iinfo(whole).min, torch.iinfo(whole).max + 1, step).to(whole).view(dtype).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() < 1e38)].sort().values
    if dtype is torch.bfloat16:
        numbers = numbers[numbers.abs() > 1e-30]
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1])])
    assert torch.equal(bits(narrowed(x, dtype)), bits(x.to(dtype)))


def test_nan_stays_nan():
    assert narrowed(torch.tensor([torch.nan]), torch.bfloat16).isnan().all()
