"""Weighted sums of rows: one addition for each row and one for each column of all rows are the same, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ep.layout import local_pairs
from ep.rows import wide
from ep.sums import FEW_RESULTS, Sums, add


def summed(slots_NK: Tensor, *, as_pairs: bool, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    weights_NK = torch.randn(slots_NK.shape, generator=generator, dtype=wide(dtype))
    pairs = local_pairs(slots_NK, weights_NK)
    rows_MD = torch.randn(pairs.rows_M.shape[0], 33, generator=generator, dtype=wide(dtype)).to(dtype)
    index_NK = torch.full(slots_NK.shape, -1).flatten()
    index_NK[(slots_NK >= 0).flatten()] = torch.arange(rows_MD.shape[0])
    out_ND = torch.empty(slots_NK.shape[0], 33, dtype=dtype).fill_(torch.nan)
    add(Sums(rows_MD, index_NK.view(slots_NK.shape), weights_NK, pairs if as_pairs else None), out_ND)
    return out_ND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows", [1, FEW_RESULTS - 1, FEW_RESULTS, 3 * FEW_RESULTS + 1])
def test_full_sums_do_not_care_how_they_are_added(num_rows: int, dtype: torch.dtype):
    slots_NK = torch.zeros(num_rows, 5, dtype=torch.int64)
    assert torch.equal(summed(slots_NK, as_pairs=True, dtype=dtype), summed(slots_NK, as_pairs=False, dtype=dtype))


def test_sums_with_holes_as_many_as_full_ones_have_rows_are_not_taken_for_full():
    slots_NK = torch.zeros(FEW_RESULTS + 2, 4, dtype=torch.int64)
    slots_NK[::2, 1] = -1
    slots_NK[3] = -1
    found = summed(slots_NK, as_pairs=True)
    assert torch.equal(found, summed(slots_NK, as_pairs=False))
    assert not found[3].any()
