"""FP8 (e4m3fn) with block scales: weights in 128 x 128 blocks, activations in rows of 128. Reference in torch.

A scale is always the multiplier that takes the stored value back (the checkpoints call it `weight_scale_inv`).
Blocks at the right and lower edge may be partial: their scale covers what is there.

Legend: T tokens here, D model; N x W a weight's rows and columns, n x w its blocks, ... leading sizes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ep import wide

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
# Activations below this are not worth a finer scale; the floor keeps an all-zero row finite.
ROW_FLOOR = 1e-4


def num_blocks(length: int, block: int = BLOCK) -> int:
    """Blocks that cover `length`, the last one possibly partial."""
    return -(-length // block)


def quantize_blocks(w: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(fp8 [..., N, W], float32 scales [..., n, w]) of a weight; a block of zeros gets scale 1."""
    rows, columns = w.shape[-2:]
    values = w.to(wide(w.dtype))
    edges = (0, -columns % block, 0, -rows % block)
    tiles = functional.pad(values, edges).unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    peak = tiles.abs().amax(dim=(-3, -1))
    scale = torch.where(peak > 0, peak / FP8_MAX, 1.0).to(torch.float32)
    q = tiles / scale.to(values.dtype)[..., :, None, :, None]
    q = q.flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    return q.clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous(), scale


def dequantize_blocks(q: Tensor, scale_inv: Tensor, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """[..., N, W] in `dtype`: value times its block's scale, computed in the wide dtype and rounded once.

    Goes one row of blocks at a time, so the wide copy is never larger than that.
    """
    rows, columns = q.shape[-2:]
    expected = (*q.shape[:-2], num_blocks(rows, block), num_blocks(columns, block))
    assert scale_inv.shape == expected, f"scales {tuple(scale_inv.shape)} for fp8 {tuple(q.shape)}, want {expected}"
    column_scale = scale_inv.to(wide(dtype)).repeat_interleave(block, dim=-1)[..., :columns]
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for index in range(expected[-2]):
        part = slice(index * block, (index + 1) * block)
        out[..., part, :] = q[..., part, :].to(column_scale.dtype) * column_scale[..., index : index + 1, :]
    return out


def quantize_rows(x_TD: Tensor, *, power_of_two: bool = False, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(fp8 [T, D], float32 scales [T, ceil(D / block)]) of activations, a scale for each row and 128 columns.

    `power_of_two` rounds every scale up to a power of two (the ue8m0 format).
    """
    columns = x_TD.shape[1]
    values = x_TD.to(wide(x_TD.dtype))
    tiles = functional.pad(values, (0, -columns % block)).unflatten(1, (num_blocks(columns, block), block))
    scale = (tiles.abs().amax(dim=2).clamp_min(ROW_FLOOR) / FP8_MAX).to(torch.float32)
    if power_of_two:
        scale = _round_up_to_power_of_two(scale)
    q = (tiles / scale.to(values.dtype).unsqueeze(2)).flatten(1)[:, :columns]
    return q.clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous(), scale


def dequantize_rows(q_TD: Tensor, scale: Tensor, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """[T, D] in `dtype`: the inverse of `quantize_rows`, computed in the wide dtype and rounded once."""
    scale_TD = scale.to(wide(dtype)).repeat_interleave(block, dim=1)[:, : q_TD.shape[1]]
    return (q_TD.to(scale_TD.dtype) * scale_TD).to(dtype)


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Smallest power of two not below each (positive) value, exact: .3 -> .5, .5 -> .5."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [1/2, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
