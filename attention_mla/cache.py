"""Pages of latents. A page holds `page_size` tokens of one request in every layer; place = page * page_size + offset.

Which request owns which page is decided elsewhere; what a step reads and writes is the `view`'s.

Letters: T tokens here, J places to clear, W = C + P latent width.
"""

import torch
from torch import Tensor


def bytes_per_token(*, num_layers: int, latent_width: int, dtype: torch.dtype) -> int:
    """Cache bytes that one token takes in all layers."""
    return num_layers * latent_width * dtype.itemsize


class LatentCache:
    """The latents of one rank: [layers, pages, page_size, W], normed latent first, then the rotated rope key.

    One row behind the last page takes what is written to place -1 and is never read. What was not written is not zero.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        latent_width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        num_rows = num_pages * page_size + 1
        self._latents_LNW = torch.empty(num_layers, num_rows, latent_width, dtype=dtype, device=device)

    @property
    def pages(self) -> Tensor:
        """[layers, pages, page_size, W], a view."""
        return self._latents_LNW[:, :-1].unflatten(1, (self.num_pages, self.page_size))

    def rows(self, layer: int) -> Tensor:
        """One layer's latents by place [pages * page_size + 1, W], a view; the last row is nobody's."""
        return self._latents_LNW[layer]

    def clear(self, layer: int, places_J: Tensor) -> None:
        """Zeroes single places (int64)."""
        self._latents_LNW[layer].index_fill_(0, places_J, 0)

    def append(self, layer: int, latents_TW: Tensor, places_T: Tensor) -> None:
        """Writes each token's latent to its place (int64); tokens with place -1 are skipped."""
        # Index -1 is the last row, so that skipping needs neither a mask nor a look at the values.
        self._latents_LNW[layer].index_put_((places_T,), latents_TW)
