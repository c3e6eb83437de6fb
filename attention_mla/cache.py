"""Pages of latents. A page holds `page_size` tokens of one request in every layer; place = page * page_size + offset.

Which request owns which page is decided elsewhere; what a step reads and writes is the `view`'s. Pages may be copied
whole, as bytes, to any cache of the same format.

Letters: T tokens here, J places to clear, W = C + P latent width, X what a row is stored as.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .config import MlaConfig
from .latent_rows import LatentRows, fp8_row_bytes

__all__ = ["CacheFormat", "LatentCache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """What a token leaves in one layer: plain in the run dtype, or in fp8 (see `latent_rows`)."""

    rank: int
    rope_dim: int
    dtype: torch.dtype
    """Of the run: what attention reads."""
    fp8: bool = False

    @classmethod
    def of(cls, config: MlaConfig, dtype: torch.dtype, *, fp8: bool = False) -> Self:
        """Of a model's latents."""
        return cls(rank=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim, dtype=dtype, fp8=fp8)

    @property
    def row_bytes(self) -> int:
        """Of one token in one layer."""
        if self.fp8:
            return fp8_row_bytes(self.rank, self.rope_dim)
        return (self.rank + self.rope_dim) * self.dtype.itemsize

    @property
    def stored(self) -> torch.dtype:
        """What a row's X are."""
        return torch.uint8 if self.fp8 else self.dtype

    def rows(self, stored_NX: Tensor) -> LatentRows:
        """Stored rows with their parts."""
        if self.fp8:
            return LatentRows.fp8(stored_NX, rank=self.rank, rope_dim=self.rope_dim, dtype=self.dtype)
        return LatentRows.plain(stored_NX, self.rank)


class LatentCache:
    """The latents of one rank: [layers, pages, page_size, X], normed latent first, then the rotated rope key.

    One row behind the last page takes what is written to place -1 and is never read. What was not written is not zero.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        row: CacheFormat,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.row = row
        shape = (num_layers, num_pages * page_size + 1, row.row_bytes // row.stored.itemsize)
        self._stored_LNX = torch.empty(shape, dtype=row.stored, device=device)
        self._rows = [row.rows(stored_NX) for stored_NX in self._stored_LNX]

    @property
    def pages(self) -> Tensor:
        """[layers, pages, page_size, X], a view of what is stored: latents in the run dtype, or bytes."""
        return self._stored_LNX[:, :-1].unflatten(1, (self.num_pages, self.page_size))

    def rows(self, layer: int) -> LatentRows:
        """One layer's rows by place, views; the last row is nobody's."""
        return self._rows[layer]

    def clear(self, layer: int, places_J: Tensor) -> None:
        """Zeroes single places (int64)."""
        self._stored_LNX[layer].index_fill_(0, places_J, 0)

    def append(self, layer: int, latents_TW: Tensor, places_T: Tensor) -> None:
        """Writes each token's latent to its place (int64); tokens with place -1 are skipped."""
        self._rows[layer].write(latents_TW, places_T)
