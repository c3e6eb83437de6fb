"""A row of the latent cache as kernels see it: latents and rope key of one token, plain or in fp8.

Plain, both lie side by side in one dtype. In fp8 a row of 512 + 64 takes 656 bytes, against 1,152 in bfloat16:

    512 B  latent, e4m3     16 B  a float32 scale for each 128 of them     128 B  rotated rope key, bfloat16

A scale takes the stored value back: latent = value * scale, scale = max(largest magnitude, 1e-4) / 448. The rope key
stays bfloat16: its few dims carry the positions. Knows bytes of a row; whose row it is, is the cache's.

Letters: T tokens here, N latents by place, C latent rank, P rope dim, W = C + P, G groups of 128 latents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import GROUP, fp8_row_bytes

__all__ = ["FP8", "GROUP", "LatentRows", "Latents", "fp8_row_bytes"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FLOOR = 1e-4
"""Of the largest magnitude of a group: keeps a group of zeros finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """What a token leaves in the cache, before norm and rotation."""

    latent_TC: Tensor
    rope_TP: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRows:
    """One layer's rows by place: as they are stored, and as views of their parts."""

    stored_NX: Tensor
    """[N, W] in the run dtype, or uint8 [N, bytes of a row]."""
    latents_NC: Tensor
    scales_NG: Tensor | None
    """None where latents are plain."""
    rope_NP: Tensor
    dtype: torch.dtype
    """Of the run: what rows are read as."""

    @classmethod
    def plain(cls, rows_NW: Tensor, rank: int) -> "LatentRows":
        """Of rows that hold latent and rope key in one dtype."""
        latents_NC, rope_NP = rows_NW[:, :rank], rows_NW[:, rank:]
        return cls(stored_NX=rows_NW, latents_NC=latents_NC, scales_NG=None, rope_NP=rope_NP, dtype=rows_NW.dtype)

    @classmethod
    def fp8(cls, bytes_NX: Tensor, *, rank: int, rope_dim: int, dtype: torch.dtype = torch.bfloat16) -> "LatentRows":
        """Of uint8 [N, X], X = fp8_row_bytes(rank, rope_dim)."""
        assert bytes_NX.dtype is torch.uint8, f"rows of {bytes_NX.dtype}"
        assert bytes_NX.shape[1] == fp8_row_bytes(rank, rope_dim), f"rows of {bytes_NX.shape[1]} bytes"
        scales_end = rank + 4 * (rank // GROUP)
        return cls(
            stored_NX=bytes_NX,
            latents_NC=bytes_NX.view(FP8)[:, :rank],
            scales_NG=bytes_NX.view(torch.float32)[:, rank // 4 : scales_end // 4],
            rope_NP=bytes_NX.view(torch.bfloat16)[:, scales_end // 2 :],
            dtype=dtype,
        )

    def write(self, latents_TW: Tensor, places_T: Tensor) -> None:
        """Store latents with their rope keys behind them; place -1 is the last row, which is nobody's."""
        # Index -1 is the last row, so that skipping needs neither a mask nor a look at the values.
        self.stored_NX.index_put_((places_T,), latents_TW if self.scales_NG is None else self._to_bytes(latents_TW))

    def take(self, places_S: Tensor) -> Tensor:
        """[S, W] the rows at some places, in the run dtype."""
        return self._read(self.stored_NX.index_select(0, places_S))

    def take_blocks(self, blocks: Tensor, block_size: int) -> Tensor:
        """[blocks * block_size, W]: the rows of whole blocks of consecutive places, in the run dtype."""
        blocks_GBX = self.stored_NX[:-1].unflatten(0, (-1, block_size)).index_select(0, blocks)
        return self._read(blocks_GBX.flatten(0, 1))

    def read(self, dtype: torch.dtype) -> Tensor:
        """[N, W] in `dtype`, each latent widened in float32 and rounded once."""
        latents_NC = self.latents_NC.to(dtype)
        if self.scales_NG is not None:
            latents_NC = (self.latents_NC.float() * self.scales_NG.repeat_interleave(GROUP, dim=1)).to(dtype)
        return torch.cat((latents_NC, self.rope_NP.to(dtype)), dim=1)

    def _read(self, stored_SX: Tensor) -> Tensor:
        return stored_SX if self.scales_NG is None else self._like(stored_SX).read(self.dtype)

    def _to_bytes(self, latents_TW: Tensor) -> Tensor:
        rank = self.latents_NC.shape[1]
        rows = self._like(self.stored_NX.new_empty(latents_TW.shape[0], self.stored_NX.shape[1]))
        assert rows.scales_NG is not None
        groups_TG = latents_TW[:, :rank].float().unflatten(1, (-1, GROUP))
        scale_TG = groups_TG.abs().amax(dim=2).clamp_min(FLOOR) / FP8_MAX
        values_TC = (groups_TG / scale_TG.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(1)
        rows.latents_NC.view(torch.uint8).copy_(values_TC.view(torch.uint8))
        rows.scales_NG.copy_(scale_TG)
        rows.rope_NP.copy_(latents_TW[:, rank:])
        return rows.stored_NX

    def _like(self, bytes_SX: Tensor) -> "LatentRows":
        rank, rope_dim = self.latents_NC.shape[1], self.rope_NP.shape[1]
        return LatentRows.fp8(bytes_SX, rank=rank, rope_dim=rope_dim, dtype=self.dtype)
