"""The latent cache's pages as a count: who holds which, and which may be handed out next.

A page is in exactly one of three places:

    held      references > 0    requests use it; never handed out
    plain     references = 0    nothing worth keeping in it
    cached    references = 0    its content has a key: found again by `find`, handed out only when no plain one is left,
                                the one released longest ago first

Knows numbers only: not what a page contains, not which request holds it, nor how a key is made (see `prefix`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """`num_pages` pages of `page_size` tokens each, with reference counts and keys for full pages.

    `on_evict` is told the key of a page that is handed out again, and so is no longer found.
    """

    def __init__(self, num_pages: int, page_size: int, *, on_evict: Callable[[bytes], None] | None = None) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, e.g. 64")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictions = 0
        self._on_evict = on_evict
        self._references = [0] * num_pages
        self._plain = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return len(self._plain) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages whose content may still be found."""
        return len(self._cached)

    def references(self, page: int) -> int:
        """How many hold this page."""
        return self._references[page]

    def is_published(self, page: int) -> bool:
        """Whether `find` can lead to this page."""
        return page in self._key_of_page

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing changed) when fewer are free."""
        if count > self.num_free:
            return None
        pages = [self._plain.pop() if self._plain else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page; a cached free one is held again."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page of a request; its last page becomes free first, so it is evicted first.

        A prefix is of no use without what comes before it: that is why the end of a chain goes before its start.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was released more often than it was held"
            if self._references[page] == 0:
                if page in self._key_of_page:
                    self._cached[page] = None
                else:
                    self._plain.append(page)

    def num_held_only_by(self, holdings: Iterable[Sequence[int]]) -> int:
        """Pages that become free once all these holders have released theirs."""
        held: dict[int, int] = {}
        for pages in holdings:
            for page in pages:
                held[page] = held.get(page, 0) + 1
        return sum(count == self._references[page] for page, count in held.items())

    def num_unheld(self, pages: Iterable[int]) -> int:
        """How many of these are free (found by key, but held by nobody)."""
        return sum(self._references[page] == 0 for page in pages)

    def publish(self, page: int, key: bytes) -> bool:
        """Let `find(key)` lead to this held page. False, and nothing changes, when the key leads to a page already."""
        assert self._references[page] > 0, f"page {page} is published by nobody"
        assert page not in self._key_of_page, f"page {page} already has a key"
        if key in self._page_of_key:
            return False
        self._page_of_key[key] = page
        self._key_of_page[page] = key
        return True

    def find(self, key: bytes) -> int | None:
        """The page published under this key, held or free; `retain` it before anything else is allocated."""
        return self._page_of_key.get(key)

    def forget(self) -> None:
        """Drop every key: held pages stay held, cached free ones become plain."""
        self._page_of_key.clear()
        self._key_of_page.clear()
        self._plain.extend(self._cached)
        self._cached.clear()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        key = self._key_of_page.pop(page)
        del self._page_of_key[key]
        self.num_evictions += 1
        if self._on_evict is not None:
            self._on_evict(key)
        return page
