"""Which pages of a prompt are in the cache already: full pages only, found by the digest of everything up to their end.

    digest(page i) = SHA-256( digest(page i - 1) + token ids of page i, 8 bytes little-endian each )
    digest(page -1) = SHA-256( length of the model's salt, the model's salt, the request's salt )

Equal digests mean equal tokens at equal positions under equal salts, so two requests may read one page; nobody writes
it again, since only computed full pages are published. Knows tokens and pages; not the schedule, and not the latents.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from .kv_log import KvLog
from .pages import PagePool
from .request import Request


class PrefixCache:
    """Finds and publishes full pages in a `PagePool`. Switched off, it finds nothing and publishes nothing.

    `num_queried` and `num_hit` count prompt tokens of admitted requests: all of them, and those found here.
    `log` is told what is published; of what is lost again, the pool's `on_evict` is to tell it. `save` gets the digest
    and the number of each page that is.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        enabled: bool = True,
        model_salt: str = "",
        log: KvLog | None = None,
        save: Callable[[bytes, int], None] | None = None,
    ) -> None:
        self.pool = pool
        self.save = save
        self.log = log
        self.enabled = enabled
        self.num_queried = 0
        self.num_hit = 0
        self._model_salt = model_salt.encode()

    def match(self, request: Request, *, max_tokens: int) -> list[int]:
        """Pages that hold the longest cached prefix of `request.tokens` of at most `max_tokens` tokens.

        Nothing is retained and nothing counted: see `take`. Digests are kept on the request, so asking again is cheap.
        """
        if not self.enabled:
            return []
        pages = []
        for index in range(min(max_tokens, len(request.tokens)) // self.pool.page_size):
            page = self.pool.find(self._digest(request, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, request: Request, pages: Sequence[int]) -> None:
        """Hold `pages` (from `match`), the request's cached prefix; its first admission is counted.

        What a preempted request finds again was its own, or is no news.
        """
        if self.enabled and not request.num_preemptions:
            self.num_queried += len(request.tokens)
            self.num_hit += len(pages) * self.pool.page_size
        self.pool.retain(pages)

    def num_computed(self, request: Request, pages: list[int]) -> int:  # noqa: ARG002  # of others than this cache
        """Tokens of the request that need no computing, once it holds `pages` (from `match`)."""
        return len(pages) * self.pool.page_size

    def publish(self, request: Request, *, num_tokens: int) -> None:
        """Make the full pages within the request's first `num_tokens` tokens (computed, and read) findable.

        Of two pages with the same content the one that was published first is kept.
        """
        num_full = num_tokens // self.pool.page_size
        if not self.enabled or num_full <= request.num_published:
            return
        for index in range(request.num_published, num_full):
            digest = self._digest(request, index)
            if self.pool.publish(request.pages[index], digest):
                self._tell(request, index, digest)
        request.num_published = num_full

    def digests(self, request: Request, *, num_tokens: int) -> list[bytes]:
        """Of the full pages within the request's first `num_tokens` tokens; none where it is switched off."""
        if not self.enabled:
            return []
        return [self._digest(request, index) for index in range(num_tokens // self.pool.page_size)]

    def flush(self) -> None:
        """Forget every page; running requests keep theirs, and publish only pages they fill from now on."""
        self.pool.forget()
        if self.log is not None:
            self.log.cleared()

    def _tell(self, request: Request, index: int, digest: bytes) -> None:
        if self.save is not None:
            self.save(digest, request.pages[index])
        if self.log is not None:
            parent = request.digests[index - 1] if index else None
            start = index * self.pool.page_size
            self.log.stored(digest, parent, request.tokens[start : start + self.pool.page_size])

    def _digest(self, request: Request, index: int) -> bytes:
        """The digest of page `index`, whose tokens are all known; those before it are computed on the way, once."""
        size, digests = self.pool.page_size, request.digests
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else root_digest(self._model_salt, request.cache_salt.encode())
            digests.append(chained_digest(parent, request.tokens[start : start + size]))
        return digests[index]


def root_digest(model_salt: bytes, cache_salt: bytes) -> bytes:
    """The start of every chain under these salts; the length keeps ("a", "bc") and ("ab", "c") apart."""
    return hashlib.sha256(struct.pack("<q", len(model_salt)) + model_salt + cache_salt).digest()


def chained_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a page, given the digest of the page before it."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def token_digest(tokens: Sequence[int]) -> bytes:
    """What stands for these tokens where pages of them are handed over."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).digest()
