"""What kernels are written with, against torch: the numbers of bfloat16, e^x, and a counter that threads share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ep.cpu import language
from ep.cpu.calls import kernel, words_of
from ep.cpu.language import bits_double, claim, floats, halves


def each_value(function: Callable[..., Any], source: Callable[..., Any], target: Callable[..., Any]) -> Any:
    """A kernel that applies a function to every number at args[2] and puts what comes out at args[3]."""

    @kernel(fast=False)
    def apply(args):
        while True:
            piece = claim(args)
            if piece >= args[1]:
                return
            target(args[3])[piece] = function(source(args[2])[piece])

    return apply


def applied(function: Callable[..., Any], x: Tensor, out: Tensor) -> Tensor:
    views = {torch.bfloat16: halves, torch.float32: floats}
    each_value(function, views[x.dtype], views[out.dtype])(x.numel(), x.data_ptr(), out.data_ptr())
    return out


def odd_floats() -> Tensor:
    """Ties, denormals, infinities, NaN, and whatever else random bits are."""
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(1)).int()
    ties = torch.arange(-500, 500).int() * 0x8000 + 0x3F800000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45])
    return torch.cat((bits.view(torch.float32), ties.view(torch.float32), special))


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them():
    x = odd_floats()
    found, wanted = applied(language.narrow, x, torch.empty(x.shape, dtype=torch.bfloat16)), x.bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    is_number = ~wanted.isnan()
    assert torch.equal(found[is_number].view(torch.int16), wanted[is_number].view(torch.int16))


def test_lanes_are_rounded_like_single_numbers():
    @kernel(fast=False)
    def run(args):
        while True:
            piece = claim(args)
            if piece >= args[1]:
                return
            language.narrow_lanes(args[2] + piece * 64, args[3] + piece * 32)

    x = odd_floats()[:-8]
    x = x[: len(x) // 16 * 16]
    x[-8:] = odd_floats()[-8:]
    found, wanted = (torch.empty(x.shape, dtype=torch.bfloat16) for _ in range(2))
    run(len(x) // 16, x.data_ptr(), found.data_ptr())
    applied(language.narrow, x, wanted)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def test_every_bfloat16_is_widened_to_itself():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    found = applied(language.widen, x, torch.empty(x.shape))
    assert torch.equal(found.view(torch.int32), x.float().view(torch.int32))


def test_exponentials_are_within_two_units_of_the_last_place():
    x = torch.linspace(-87, 88, 100_001)
    found, truth = applied(language.exp, x, torch.empty_like(x)).double(), x.double().exp()
    assert float((found / truth - 1).abs().max()) < 2 * 2**-23
    assert float(applied(language.exp, torch.zeros(1), torch.empty(1))) == 1.0


def test_exponentials_of_what_is_beyond_stay_finite_and_nan_stays():
    x = torch.tensor([-torch.inf, -1e30, 1e30, torch.inf, torch.nan])
    found = applied(language.exp, x, torch.empty_like(x))
    assert bool(found[:4].isfinite().all())
    assert bool((found[:2] < 1e-37).all())
    assert bool(found[4].isnan())


def test_the_gate_of_an_mlp_is_torch_s():
    x = torch.linspace(-100, 100, 20_001)
    found = applied(language.silu, x, torch.empty_like(x))
    torch.testing.assert_close(found, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-30)


def test_a_number_with_a_point_comes_through_whole_ones():
    @kernel()
    def put(args):
        if claim(args) < args[1]:
            floats(args[2])[0] = np.float32(bits_double(args[3]) * 2)

    out = torch.empty(1)
    put(1, out.data_ptr(), *words_of(-0.375))
    assert float(out) == -0.75


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_of_work_is_done_once(threads: int, torch_threads_are: Callable[[int], None]):
    @kernel()
    def count(args):
        while True:
            piece = claim(args)
            if piece >= args[1]:
                return
            language.add(args[2] + 8 * piece, 1)

    torch_threads_are(threads)
    done = torch.zeros(1000, dtype=torch.int64)
    for _ in range(50):
        count(1000, done.data_ptr())
    assert done.tolist() == [50] * 1000
