"""Rows that are to be added up, and the adding: one product and one addition at a time in a fixed order, in the wide
dtype, so that sums repeat bit for bit. (On a CPU index_add_ adds in index order.)

Results stay lazy until somebody says where they go: what an expert rank returns is added up straight into the send
buffer. Knows no ranks.

Legend: M rows, D model, N results, J rows added for one at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import LocalPairs
from .rows import wide

CHUNK_BYTES = 1 << 20
"""What is weighed at once: products that are added while they are near cost half as much."""
FEW_RESULTS = 32
"""Below, an addition for each row costs less than one for all of them."""


class Sums(NamedTuple):
    """Result n is the sum over j of weights[n, j] * rows[index[n, j]]."""

    rows_MD: Tensor
    index_NJ: Tensor
    """-1 none."""
    weights_NJ: Tensor | None = None
    """In the wide dtype; None: all are 1."""
    pairs: LocalPairs | None = None
    """What the index says as a list, if the host has it already: pair m is row m."""


def add(sums: Sums, out_ND: Tensor) -> None:
    """Fill `out`, from j = 0 on; a result without rows is zeros. Rounded once, to out's dtype. The host reads nothing.

    rows [[1], [2], [4]], index [[2, 0], [-1, 1], [-1, -1]], weights [[10, 1], [5, .5], [0, 0]] -> [[41], [1], [0]]
    """
    dtype, num_out = wide(sums.rows_MD.dtype), out_ND.shape[0]
    total_ND = torch.zeros(num_out + 1, out_ND.shape[1], dtype=dtype, device=out_ND.device)
    if sums.pairs is not None and _is_full(sums):
        _add_columns(sums.rows_MD, sums.pairs, total_ND[:num_out])
    elif sums.pairs is not None:
        _add_pairs(sums.rows_MD, sums.pairs, total_ND)
    elif sums.rows_MD.shape[0]:
        out_N = torch.arange(num_out, device=out_ND.device)
        for j, index_N in enumerate(sums.index_NJ.unbind(1)):
            rows_ND = sums.rows_MD.index_select(0, index_N.clamp(min=0)).to(dtype)
            if sums.weights_NJ is not None:
                rows_ND *= sums.weights_NJ[:, j : j + 1]
            # One more result takes what is none: to mask whole rows, which may hold anything, costs twice the adding.
            total_ND.index_add_(0, out_N.where(index_N >= 0, num_out), rows_ND)
    out_ND.copy_(total_ND[:num_out])


def _is_full(sums: Sums) -> bool:
    """Every result is a sum of J rows, and there are enough results that J additions of all beat one for each row."""
    num_out, most = sums.index_NJ.shape
    return num_out >= FEW_RESULTS and sums.rows_MD.shape[0] == num_out * most


def _add_columns(rows_MD: Tensor, pairs: LocalPairs, total_ND: Tensor) -> None:
    """Pair m is of result m // J. A product and an addition at a time, in the order of `_add_pairs`."""
    num_out = total_ND.shape[0]
    for rows_ND, weights_N1 in zip(
        rows_MD.view(num_out, -1, rows_MD.shape[1]).unbind(1),
        pairs.weights_M.view(num_out, -1, 1).unbind(1),
        strict=True,
    ):
        total_ND += rows_ND * weights_N1


def _add_pairs(rows_MD: Tensor, pairs: LocalPairs, total_ND: Tensor) -> None:
    chunk = max(1, CHUNK_BYTES // (total_ND.shape[1] * total_ND.dtype.itemsize))
    for begin in range(0, rows_MD.shape[0], chunk):
        part = slice(begin, begin + chunk)
        total_ND.index_add_(0, pairs.rows_M[part], rows_MD[part] * pairs.weights_M[part].unsqueeze(1))
