"""Sums of bf16 rows in a kernel: the bits of those in torch."""

from collections.abc import Callable

import pytest
import torch

from ep.cpu.sums import add_rows
from ep.ops import exchange_ops
from ep.sums import Sums, add


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("num_out", "most"), [(0, 3), (1, 1), (5, 3), (64, 8)])
def test_sums_have_the_bits_of_torch_s(
    num_out: int, most: int, weighted: bool, threads: int, torch_threads_are: Callable[[int], None]
):
    torch_threads_are(threads)
    noise = torch.Generator().manual_seed(num_out)
    rows = torch.randn(50, 120, generator=noise).bfloat16()
    index = torch.randint(-1, 50, (num_out, most), generator=noise)
    weights = torch.randn(num_out, most, generator=noise) if weighted else None
    sums = Sums(rows[:, 10:107], index, weights)
    wanted, found, through_ops = (torch.full((num_out, 97), torch.nan).bfloat16() for _ in range(3))
    add(sums, wanted)
    add_rows(sums, found)
    exchange_ops("numba").add(sums, through_ops)
    assert torch.equal(found, wanted)
    assert torch.equal(through_ops, wanted)


def test_other_formats_are_added_in_torch():
    rows, out = torch.ones(2, 4, dtype=torch.float64), torch.empty(1, 4, dtype=torch.float64)
    exchange_ops("numba").add_to_places(Sums(rows, torch.tensor([[0, 1]])), out)
    assert out.tolist() == [[2.0] * 4]
