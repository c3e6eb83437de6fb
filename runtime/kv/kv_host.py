"""Pages in host memory beside the cache: every full page is copied there, and the one asked for longest ago goes first.

A request that lost its pages, or one that begins like an earlier one, finds them here when they are no longer in the
cache. One rank's. Knows digests and bytes; not whose pages they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .connector import Kept, KvLoadError, Landed, Want
from .kv_pages import PageBytes


class _Page(NamedTuple):
    """uint8 [L, Y] on the host; the sum stays where it was computed until somebody asks."""

    bytes_LY: Tensor
    sum: Tensor


class HostConnector:
    """See `connector.Connector`. Holds at most `max_bytes` of pages; less than one page is a ValueError."""

    def __init__(self, cache: PageBytes, *, max_bytes: int) -> None:
        self._cache = cache
        self._most = max_bytes // cache.page_bytes
        if not self._most:
            raise ValueError(
                f"kv_host_bytes is {max_bytes}; a page takes {cache.page_bytes} bytes, so it must be at least that"
            )
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages that are here."""
        return len(self._pages)

    def find(self, want: Want) -> HostLoad | None:
        """For the protocol see `connector.Connector`."""
        found = []
        for digest in want.digests:
            page = self._pages.get(digest)
            if page is None:
                break
            self._pages.move_to_end(digest)
            found.append((digest, page))
        return HostLoad(self, found, num_tokens=len(found) * self._cache.page_size) if found else None

    def save(self, digest: bytes, page: int) -> None:
        """For the protocol see `connector.Connector`."""
        if digest in self._pages:
            self._pages.move_to_end(digest)
            return
        while len(self._pages) >= self._most:
            self._pages.popitem(last=False)
        [copy_LY] = self._cache.take([page])
        self._pages[digest] = _Page(copy_LY, self._cache.sums([page], self._cache.page_size))

    def forget(self, digests: Sequence[bytes]) -> None:
        """What these pages hold is wrong."""
        for digest in digests:
            self._pages.pop(digest, None)

    def lend(self, kept: Kept) -> None:
        """Nothing: nobody else sees this memory."""

    def close(self) -> None:
        """For the protocol see `connector.Connector`."""
        self._pages.clear()


class HostLoad:
    """See `connector.Load`. The pages are kept by the load, whatever the tier drops meanwhile."""

    def __init__(self, tier: HostConnector, found: Sequence[tuple[bytes, _Page]], *, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._tier = tier
        self._found = found
        self._skip: int | None = None
        self._cancelled = False

    def begin(self, *, skip: int, pages: Sequence[int]) -> None:
        """For the protocol see `connector.Load`."""
        assert len(pages) == len(self._found) - skip, f"{len(pages)} pages for {len(self._found) - skip}"
        self._skip = skip

    def poll(self) -> Landed | None:
        """For the protocol see `connector.Load`: what is in memory is there at once."""
        if self._cancelled:
            raise KvLoadError("it was cancelled")
        if self._skip is None:
            return None
        pages = [page for _, page in self._found[self._skip :]]
        sums = torch.cat([page.sum for page in pages]).tolist()
        return Landed(sums=sums, bytes_NLY=torch.stack([page.bytes_LY for page in pages]))

    def cancel(self) -> None:
        """For the protocol see `connector.Load`. Once it has begun, its pages are not trusted any more."""
        self._cancelled = True
        if self._skip is not None:
            self._tier.forget([digest for digest, _ in self._found[self._skip :]])
