"""Pages over the connection that was made for them: the plainest way, for tests and for small prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .connector import KvLoadError
from .kv_frames import Frames
from .kv_letters import Fetch, Gone, Manifest, Page
from .kv_pages import PageBytes


class TcpMover:
    """See `kv_fetch.Mover`. What comes is gathered in memory of its own: nothing is written to the cache from here."""

    place = b""

    def __init__(self, cache: PageBytes) -> None:
        self._cache = cache

    async def pull(self, frames: Frames, manifest: Manifest, *, skip: int, pages: Sequence[int]) -> Tensor:  # noqa: ARG002
        """For the protocol see `kv_fetch.Mover`."""
        cache = self._cache
        content_NY = torch.empty(len(pages), cache.page_bytes, dtype=torch.uint8)
        await frames.say(Fetch(skip))
        for number in range(len(pages)):
            letter = await frames.hear()
            if isinstance(letter, Gone):
                raise KvLoadError(letter.why)
            if not isinstance(letter, Page) or letter.index != skip + number:
                raise KvLoadError(f"page {skip + number} was to come next, and something else came")
            if len(letter.content) != cache.page_bytes:
                raise KvLoadError(f"a page of {len(letter.content)} bytes came; here it has {cache.page_bytes}")
            content_NY[number] = torch.frombuffer(bytearray(letter.content), dtype=torch.uint8)
        return content_NY.view(len(pages), cache.num_layers, cache.layer_bytes)

    def tick(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to let go of."""
