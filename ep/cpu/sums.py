"""`ep.sums.add` for bf16 rows on a processor, bit for bit: a product and an addition at a time, in float32."""

import numpy as np
from torch import Tensor

from ..sums import Sums
from .calls import kernel
from .language import claim, floats, halves, longs, narrow, widen

__all__ = ["add_rows"]

_RESULTS = 4
"""A piece of work."""


def add_rows(sums: Sums, out_ND: Tensor) -> None:
    """Fill `out`; results without rows are zeros. Rows and out are bf16 and dense in their last side."""
    rows_MD, weights_NJ = sums.rows_MD, sums.weights_NJ
    num_out, most = sums.index_NJ.shape
    assert rows_MD.stride(1) == 1 == out_ND.stride(1), (rows_MD.stride(), out_ND.stride())
    if not num_out:
        return
    _add_kernel(
        -(-num_out // _RESULTS),
        rows_MD.data_ptr(),
        2 * rows_MD.stride(0),
        sums.index_NJ.data_ptr(),
        *sums.index_NJ.stride(),
        0 if weights_NJ is None else weights_NJ.data_ptr(),
        *((0, 0) if weights_NJ is None else weights_NJ.stride()),
        out_ND.data_ptr(),
        2 * out_ND.stride(0),
        num_out,
        most,
        out_ND.shape[1],
    )


_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@kernel(fast=False)
def _add_kernel(args):
    rows, row_bytes, index, index_row, index_column = args[2], args[3], longs(args[4]), args[5], args[6]
    weights, weights_row, weights_column = args[7], args[8], args[9]
    out, out_bytes, num_out, most, width = args[10], args[11], args[12], args[13], args[14]
    total = np.empty(width, np.float32)
    while True:
        first = claim(args) * _RESULTS
        if first >= num_out:
            return
        for n in range(first, min(first + _RESULTS, num_out)):
            total[:] = _ZERO
            for j in range(most):
                place = index[n * index_row + j * index_column]
                if place >= 0:
                    weight = floats(weights)[n * weights_row + j * weights_column] if weights else _ONE
                    row = halves(rows + place * row_bytes)
                    for d in range(width):
                        total[d] += widen(row[d]) * weight
            to = halves(out + n * out_bytes)
            for d in range(width):
                to[d] = narrow(total[d])
