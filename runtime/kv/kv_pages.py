"""Pages of the latent cache as bytes that can leave it: taken out, put in, summed, and of which kind they are.

A page is `layers` pieces of page_size rows each, whatever a row is stored as; elsewhere it is one piece:

    cache   [layers, pages, page_size, X]        out of it   uint8 [pages, layers, page_size * row bytes]

The sum of a page is that of its words, each times an odd number that follows from the word's place, modulo 2^64. One
changed word always changes it, and two cancel out once in 2^63. It is not a signature: who may hand pages over is
settled before. Tokens past the last valid one are left out, so that the rest of a page may hold anything.

Shapes: N pages, L layers, P tokens of a page, X what a row is stored as, W words of a row, Y bytes of a layer's page.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

VERSION = 1
"""Of the format of pages and of what engines say about them."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_SAMPLES, _SAMPLE_BYTES = 8, 4096


class Cache(Protocol):
    """What holds pages; see `attention_mla.LatentCache`."""

    @property
    def pages(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What must be equal where a page is used and where it was computed."""

    version: int = VERSION
    model: str
    """Digest of the model and of how it is run, see `model_digest`."""
    layout: str
    """Digest of layers, page size, bytes of a row and number format."""

    def differs(self, other: Kind) -> str | None:
        """What of another one is not as here, in words."""
        for name in ("version", "model", "layout"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"its {name} is {theirs}, here it is {mine}"
        return None


class PageBytes:
    """The pages of one rank's cache. For one thread at a time; reading pages that nobody writes may go on beside."""

    def __init__(self, cache: Cache) -> None:
        self._pages_LNPX = cache.pages
        self.num_layers, self.num_pages, self.page_size, _ = self._pages_LNPX.shape
        self.row_bytes = self._pages_LNPX.shape[3] * self._pages_LNPX.element_size()
        self._weights_LPW = _weights(self.num_layers, self.page_size, self.row_bytes // self._word).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self._pages_LNPX.device

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Of one page in one layer."""
        return self.page_size * self.row_bytes

    @property
    def layout(self) -> str:
        """Digest of all that says what a page's bytes mean."""
        words = f"{self.num_layers}|{self.page_size}|{self.row_bytes}|{self._pages_LNPX.dtype}"
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    def address(self, layer: int, page: int) -> int:
        """Where a page's bytes of one layer lie in the device's memory; `layer_bytes` in one piece."""
        return self._pages_LNPX[layer, page].data_ptr()

    @property
    def region(self) -> tuple[int, int]:
        """Address and bytes of the memory that all pages lie in."""
        begin = self.address(0, 0)
        return begin, self.address(self.num_layers - 1, self.num_pages - 1) + self.layer_bytes - begin

    @property
    def steps(self) -> tuple[int, int]:
        """Bytes from a layer to the next, and from a page to the next."""
        layer, page, _, _ = self._pages_LNPX.stride()
        return layer * self._pages_LNPX.element_size(), page * self._pages_LNPX.element_size()

    def take(self, pages: Sequence[int]) -> Tensor:
        """A copy of these pages in host memory: uint8 [N, L, Y]."""
        taken_NLPX = self._pages_LNPX[:, list(pages)].transpose(0, 1).contiguous()
        return taken_NLPX.view(torch.uint8).reshape(len(pages), self.num_layers, self.layer_bytes).cpu()

    def put(self, pages: Sequence[int], bytes_NLY: Tensor) -> None:
        """Write what `take` gave into these pages."""
        shape = (len(pages), self.num_layers, self.page_size, self.row_bytes)
        stored_NLPX = bytes_NLY.reshape(shape).view(self._pages_LNPX.dtype)
        self._pages_LNPX[:, list(pages)] = stored_NLPX.transpose(0, 1).to(self.device)

    def sums(self, pages: Sequence[int], num_tokens: int) -> Tensor:
        """The sum of each of these pages, whose first `num_tokens` tokens count: int64 [N] on the cache's device."""
        found = [
            self._sum(page, min(max(num_tokens - index * self.page_size, 0), self.page_size))
            for index, page in enumerate(pages)
        ]
        return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=self.device)

    @property
    def _word(self) -> int:
        return math.gcd(self.row_bytes, 8)

    def _sum(self, page: int, num_tokens: int) -> Tensor:
        rows_LTX = self._pages_LNPX[:, page, :num_tokens].contiguous()
        words_LTW = rows_LTX.view(torch.uint8).view(_WORDS[self._word]).to(torch.int64)
        return (words_LTW * self._weights_LPW[:, :num_tokens]).sum()


def _weights(num_layers: int, page_size: int, num_words: int) -> Tensor:
    """An odd number for each place of a page; int64 that wraps around.

    The mixer is that of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), in
    arithmetic that is the same on every device.
    """
    mixed = torch.arange(1, num_layers * page_size * num_words + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (mixed | 1).reshape(num_layers, page_size, num_words)


def model_digest(model: object, folder: Path, *, run: Sequence[object]) -> str:
    """Of a parsed configuration, of how it is `run` (number formats, seed of dummy weights), and of its weight files.

    Two checkpoints of one shape have equal headers and sizes, so that samples tell them apart.
    """
    digest = hashlib.sha256(f"{model!r}|{tuple(run)!r}".encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for number in range(_SAMPLES):
                stream.seek(number * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
