"""A rank's side of handing latents over: which requests wait for theirs, and which prompts wait to be fetched.

    ask / offer --> begin (pages are given) --> landed --> summed up: the request's, or refused
                        failed, late or wrong: an Outcome with an error, and the pages are nobody's

Nothing waits here: loads and leases are values that are polled once a step. A load's pages are held until it is over,
even when its request has long been ended: until then somebody may write to them. Pages count as computed, and can be
found by others, only when their sums are those of the pages that were handed over. Knows requests, pages and sums;
does not know where latents come from (see `connector`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache, token_digest
from ..requests.request import Request
from ..requests.telemetry import KvStats
from .connector import Connector, Kept, KvLoadError, Landed, Lent, Load, Want

if TYPE_CHECKING:  # it needs torch, and requests are scheduled without
    from .kv_pages import PageBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A load is over for its request: these pages hold its first `num_tokens` tokens, or an error says why not."""

    request: Request
    pages: list[int]
    num_tokens: int
    error: str | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Loading:
    """A load that has pages; `request` is None when it is not wanted any more."""

    request: Request | None
    load: Load
    pages: list[int]
    skip: int
    deadline: float
    begun: float


class HandOver:
    """One rank's.

    cache       the pages as bytes; needed where there are connectors
    timeout_s   so long a load may take
    recompute   whether a request that asked for a load is computed when that fails; else it ends
    """

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache,
        *,
        connectors: Sequence[Connector] = (),
        cache: PageBytes | None = None,
        timeout_s: float = 30.0,
        recompute: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert cache is not None or not connectors, "connectors need a cache"
        self.recompute = recompute
        self.stats = KvStats()
        self._connectors = tuple(connectors)
        self._cache = cache
        self._pool = pool
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._clock = clock
        self._asking: dict[Request, Load] = {}
        self._offers: dict[Request, Load | None] = {}
        self._loading: list[_Loading] = []
        self._lent: list[tuple[Lent, tuple[int, ...]]] = []

    @property
    def awaits(self) -> int:
        """Loads and leases that are not over: somebody else will bring something, or give pages back."""
        return len(self._asking) + len(self._loading) + len(self._lent)

    @property
    def num_lent_pages(self) -> int:
        """Pages that are held for others to fetch, and those that loads have; one that several hold counts often."""
        return sum(len(pages) for _, pages in self._lent) + sum(len(one.pages) for one in self._loading)

    def asks(self, request: Request) -> bool:
        """Whether the request says who has its latents, and there is something to fetch; then it is asked for."""
        if request.kv is None or not request.kv.do_remote_prefill or not _may_load(request):
            return False
        load = self._find(request)
        self._asking[request] = load if load is not None else _Nowhere(len(request.tokens) - 1)
        return True

    def asking(self) -> list[tuple[Request, Load]]:
        """Requests that no pages were given to yet, in order of service."""
        return sorted(self._asking.items(), key=lambda item: item[0].turn)

    def offer(self, request: Request, *, num_found: int) -> Load | None:
        """What could be loaded of a waiting request beyond its first `num_found` tokens; asked once a stay in line."""
        if not self._connectors or not _may_load(request):
            return None
        if request not in self._offers:
            self._offers[request] = None if request.kv and request.kv.do_remote_prefill else self._find(request)
        load = self._offers[request]
        if load is not None and load.num_tokens <= num_found:
            load.cancel()
            self._offers[request] = load = None
        return load

    def begin(self, request: Request, load: Load, *, pages: list[int], num_found: int) -> None:
        """Fill what the first `num_found` of the request's pages do not hold already."""
        self._asking.pop(request, None)
        self._offers.pop(request, None)
        now, skip = self._clock(), num_found
        used = self._pool.pages_for(load.num_tokens)
        record = _Loading(request=request, load=load, pages=pages, skip=skip, deadline=now + self._timeout_s, begun=now)
        self._loading.append(record)
        load.begin(skip=skip, pages=pages[skip:used])

    def leave(self, request: Request) -> None:
        """The request runs, or ended: nothing more is to come for it."""
        for loads in (self._asking, self._offers):
            load = loads.pop(request, None)
            if load is not None:
                load.cancel()
        for record in self._loading:
            if record.request is request:
                record.request = None
                record.load.cancel()

    def turn(self) -> list[Outcome]:
        """What is over since the last call."""
        outcomes = []
        for request, load in list(self._asking.items()):
            error = self._failure(load)
            if error is not None:
                del self._asking[request]
                outcomes.append(Outcome(request=request, pages=[], num_tokens=0, error=error))
        for record in list(self._loading):
            outcome = self._look_at(record)
            if outcome is not None:
                outcomes.append(outcome)
        for lent, pages in [one for one in self._lent if one[0].is_over()]:
            self._lent.remove((lent, pages))
            self._pool.release(pages)
        return outcomes

    def failed(self, request: Request) -> None:
        """Do not look for the request's latents again, as long as it waits."""
        self.stats.failures += 1
        self._offers[request] = None

    def lend(self, request: Request) -> None:
        """Keep the prompt of a request that ended where others can fetch it, if it asked for that."""
        num_tokens = len(request.prompt) - 1
        if request.kv is None or not request.kv.do_remote_decode or num_tokens < 1 or self._cache is None:
            return
        pages = tuple(request.pages[: self._pool.pages_for(num_tokens)])
        kept = Kept(
            request_id=request.id,
            num_tokens=num_tokens,
            pages=pages,
            sums=tuple(self._cache.sums(pages, num_tokens).tolist()),
            identity=token_digest(request.tokens[:num_tokens]),
        )
        for connector in self._connectors:
            lent = connector.lend(kept)
            if lent is not None:
                self._pool.retain(pages)
                self._lent.append((lent, pages))
                self.stats.lent += 1
                request.kv_lent = lent.params
                return

    def save(self, digest: bytes, page: int) -> None:
        """A page can be found in the cache from now on; stores may have a copy."""
        for connector in self._connectors:
            connector.save(digest, page)

    def close(self) -> None:
        """Let go of everything."""
        for connector in self._connectors:
            connector.close()

    def _find(self, request: Request) -> Load | None:
        """The longest that any connector has."""
        num_tokens = len(request.tokens) - 1
        want = Want(
            request_id=request.id,
            num_tokens=num_tokens,
            digests=self._prefix.digests(request, num_tokens=num_tokens),
            identity=token_digest(request.tokens[:num_tokens]),
            params=request.kv if request.kv is not None and request.kv.do_remote_prefill else None,
        )
        loads = [load for connector in self._connectors if (load := connector.find(want)) is not None]
        best = max(loads, key=lambda load: load.num_tokens, default=None)
        for load in loads:
            if load is not best:
                load.cancel()
        return best

    def _failure(self, load: Load) -> str | None:
        try:
            load.poll()
        except KvLoadError as error:
            return str(error)
        return None

    def _look_at(self, record: _Loading) -> Outcome | None:
        """Whether the load is over for its request; its pages come back when nobody writes to them any more."""
        try:
            landed = record.load.poll()
            if landed is not None and record.request is not None:
                self._land(record, landed)
        except KvLoadError as error:
            return self._end(record, str(error))
        if landed is not None:
            return self._end(record, None)
        if record.request is not None and self._clock() > record.deadline:
            request, record.request = record.request, None
            record.load.cancel()
            words = f"its latents did not come within {self._timeout_s:g} s (--kv-load-timeout-s)"
            return Outcome(request=request, pages=[], num_tokens=0, error=words)
        return None

    def _end(self, record: _Loading, error: str | None) -> Outcome | None:
        self._loading.remove(record)
        if error is not None or record.request is None:
            self._pool.release(record.pages)
        if record.request is None:
            return None
        pages, num_tokens = ([], 0) if error is not None else (record.pages, record.load.num_tokens)
        return Outcome(request=record.request, pages=pages, num_tokens=num_tokens, error=error)

    def _land(self, record: _Loading, landed: Landed) -> None:
        """Put what came into the cache and sum it up there. Raises KvLoadError."""
        assert self._cache is not None, "a load without a cache"
        num_tokens = record.load.num_tokens
        pages = record.pages[record.skip : self._pool.pages_for(num_tokens)]
        if len(landed.sums) != len(pages):
            record.load.cancel()
            raise KvLoadError(f"{len(landed.sums)} pages came, and {len(pages)} were to come")
        if landed.bytes_NLY is not None:
            self._cache.put(pages, landed.bytes_NLY)
        found = self._cache.sums(pages, num_tokens - record.skip * self._pool.page_size).tolist()
        wrong = [index for index, (mine, theirs) in enumerate(zip(found, landed.sums, strict=True)) if mine != theirs]
        if wrong:
            record.load.cancel()
            raise KvLoadError(f"page {record.skip + wrong[0]} of its latents came with other content than it left with")
        self.stats.loads += 1
        self.stats.loaded_tokens += num_tokens - record.skip * self._pool.page_size
        self.stats.loaded_bytes += len(pages) * self._cache.page_bytes
        self.stats.load_s += self._clock() - record.begun


def _may_load(request: Request) -> bool:
    """Not where there is nothing before its last token, nor where somebody asks what its prompt's logits are."""
    return len(request.tokens) > 1 and request.prompt_logprobs is None


class _Nowhere:
    """The load of a request whose latents no connector here can fetch."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def begin(self, *, skip: int, pages: Sequence[int]) -> None:  # noqa: ARG002
        raise AssertionError("it failed before it was given pages")

    def poll(self) -> Landed | None:
        raise KvLoadError("no connector here fetches latents in the way that it asks for")

    def cancel(self) -> None: ...
