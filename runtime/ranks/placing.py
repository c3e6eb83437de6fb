"""What the front knows of its ranks when it places a request: what it sent there, what came back, what they may cache.

All of it is the front's own book-keeping, so nobody is asked and the same history gives the same choice: prompts count
as queued until their first token is heard, pages as used until the request ends, and a prompt's full pages as cached
where it went last, as many as that rank has pages. Knows requests and news; what weighs how much is `routing`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..requests.admission import Capacity
from ..requests.outputs import News
from ..requests.prefix import chained_digest, root_digest
from ..requests.request import Request
from .routing import Choice, RankView, RoutingConfig, route


@dataclass(slots=True, kw_only=True)
class _Stay:
    """A request on a rank, as far as the front has heard."""

    rank: int
    queued_tokens: int
    pages: int


@dataclass(slots=True, kw_only=True)
class _Shadow:
    """A rank as the front sees it."""

    capacity: Capacity
    queued_tokens: int = 0
    used_pages: int = 0
    draining: bool = False
    cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # least recently used first


class FrontDesk:
    """Places requests on ranks; `capacities` are the ranks'."""

    def __init__(self, capacities: Sequence[Capacity], config: RoutingConfig, *, caches_prefixes: bool) -> None:
        self._config = config
        self._caches_prefixes = caches_prefixes
        self._shadows = [_Shadow(capacity=capacity) for capacity in capacities]
        self._stays: dict[str, _Stay] = {}
        self._turn = 0

    @property
    def queued_tokens(self) -> tuple[int, ...]:
        """Prompt tokens on their way to each rank, or waiting there for their first token."""
        return tuple([shadow.queued_tokens for shadow in self._shadows])

    @property
    def used_pages(self) -> tuple[int, ...]:
        """Pages that the requests of each rank may grow to."""
        return tuple([shadow.used_pages for shadow in self._shadows])

    @property
    def num_pages(self) -> tuple[int, ...]:
        """That each rank has."""
        return tuple([shadow.capacity.num_pages for shadow in self._shadows])

    def pages_of(self, request: Request) -> int:
        """Pages that a request may grow to, on the rank with the most."""
        return _pages(max([s.capacity for s in self._shadows], key=lambda c: c.num_pages * c.page_size), request)

    def drain(self, rank: int) -> None:
        """No new request goes to this rank from now on."""
        self._shadows[rank].draining = True

    def choose(self, request: Request) -> Choice:
        """The rank for a request; nothing is booked yet. Raises NoRankLeft when no rank may take it."""
        digests = {size: self._digests(request, size) for size in {s.capacity.page_size for s in self._shadows}}
        views = [self._view(shadow, digests[shadow.capacity.page_size]) for shadow in self._shadows]
        return route(
            views,
            prompt_len=len(request.prompt),
            pages_needed=self.pages_of(request),
            turn=self._turn,
            config=self._config,
        )

    def book(self, request: Request, rank: int) -> None:
        """The request goes to `rank`."""
        shadow = self._shadows[rank]
        self._turn += 1
        digests = self._digests(request, shadow.capacity.page_size)
        queued = len(request.prompt) - self._matched(shadow, digests) * shadow.capacity.page_size
        stay = _Stay(rank=rank, queued_tokens=queued, pages=_pages(shadow.capacity, request))
        self._stays[request.id] = stay
        shadow.queued_tokens += stay.queued_tokens
        shadow.used_pages += stay.pages
        for digest in digests:
            shadow.cached[digest] = None
            shadow.cached.move_to_end(digest)
        while len(shadow.cached) > shadow.capacity.num_pages:
            shadow.cached.popitem(last=False)

    def hear(self, news: News) -> None:
        """A rank has said something of a request: its prompt is computed, or it has ended."""
        stay = self._stays[news.request_id]
        shadow = self._shadows[stay.rank]
        shadow.queued_tokens -= stay.queued_tokens
        stay.queued_tokens = 0
        if news.finish_reason is not None:
            shadow.used_pages -= stay.pages
            del self._stays[news.request_id]

    def _view(self, shadow: _Shadow, digests: Sequence[bytes]) -> RankView:
        return RankView(
            draining=shadow.draining,
            queued_tokens=shadow.queued_tokens,
            used_pages=shadow.used_pages,
            num_pages=shadow.capacity.num_pages,
            matched_tokens=self._matched(shadow, digests) * shadow.capacity.page_size,
        )

    def _digests(self, request: Request, page_size: int) -> list[bytes]:
        """Of the prompt's full pages; the last token is always computed, so a page that ends with it does not count."""
        if not self._caches_prefixes:
            return []
        digest = root_digest(b"", request.cache_salt.encode())
        digests = []
        for start in range(0, (len(request.prompt) - 1) // page_size * page_size, page_size):
            digest = chained_digest(digest, request.prompt[start : start + page_size])
            digests.append(digest)
        return digests

    def _matched(self, shadow: _Shadow, digests: Sequence[bytes]) -> int:
        """Pages of the longest cached beginning."""
        for count, digest in enumerate(digests):
            if digest not in shadow.cached:
                return count
        return len(digests)


def _pages(capacity: Capacity, request: Request) -> int:
    """Pages that the request may grow to."""
    longest = capacity.max_model_len if request.params.max_tokens is None else request.params.max_tokens
    max_len = min(len(request.prompt) + longest, capacity.max_model_len)
    return -(-max_len // capacity.page_size)
