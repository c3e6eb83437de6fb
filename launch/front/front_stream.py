"""What a request gets, on its way to whoever reads it: chunks that grow while nobody takes them.

    from the ranks   push push push | push        one entry an index, in the order of their first token
    to the reader    take             take        everything that an entry has become by then, as one chunk

Every index ends exactly once, and nothing follows its end. Knows tokens and ends; does not know ranks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from runtime.requests.kv_params import KvParams
from runtime.requests.outputs import News, TokenLogprob

from .front_client import Chunk


class _Entry:
    """What waits for the reader of one index."""

    __slots__ = (
        "end",
        "error",
        "index",
        "is_ready",
        "kv_lent",
        "logprobs",
        "num_cached",
        "offset",
        "prompt_logprobs",
        "since",
        "tokens",
    )

    def __init__(self, index: int, offset: int, since: float) -> None:
        self.index = index
        self.offset = offset
        self.since = since
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.num_cached = 0
        self.end: str | None = None
        self.error: str | None = None
        self.kv_lent: KvParams | None = None
        self.is_ready = False


class OpenStream:
    """The chunks of one request; see `front_client.Stream`. One reader, in the event loop's thread.

    stop_token_ids   tokens that are told as the reason where they stop an index
    interval         tokens that a chunk has at least, but for the first and the last of an index
    on_cancel        is told the index that nobody waits for any more, None for all
    """

    def __init__(
        self,
        request_id: str,
        *,
        n: int,
        stop_token_ids: frozenset[int] = frozenset(),
        interval: int = 1,
        on_cancel: Callable[[OpenStream, int | None], None],
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self.n = n
        self.num_waiting = 0
        """Tokens that nobody has taken yet."""
        self._stop_token_ids = stop_token_ids
        self._interval = interval
        self._on_cancel = on_cancel
        self._clock = clock
        self._ready: deque[_Entry] = deque()  # those that may go; the others grow on
        self._entries: list[_Entry | None] = [None] * n
        self._offsets = [0] * n
        self._ended = [False] * n
        self._num_ended = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether every index has its end, read or not."""
        return self._num_ended == self.n

    def index_has_ended(self, index: int) -> bool:
        """Whether nothing more comes of this index."""
        return self._ended[index]

    @property
    def oldest_wait(self) -> float | None:
        """Since when something has waited for the reader, by the clock; None while nothing does."""
        return self._ready[0].since if self._ready else None

    def push(self, index: int, news: News) -> None:
        """What a rank says of one index; nothing if that index has ended here already."""
        if self._ended[index]:
            return
        entry = self._entries[index] or self._new_entry(index)
        entry.tokens += news.token_ids
        self.num_waiting += len(news.token_ids)
        if news.logprobs is not None:
            entry.logprobs = [*(entry.logprobs or ()), *news.logprobs]
        if news.prompt_logprobs is not None:
            entry.prompt_logprobs = news.prompt_logprobs
        entry.num_cached = news.num_cached
        if news.finish_reason is not None:
            words = news.error or ("the sampler found no usable logits" if news.finish_reason == "error" else None)
            entry.kv_lent = news.kv_lent
            self._end(entry, str(news.finish_reason), words)
        if entry.end is not None or not entry.offset or len(entry.tokens) >= self._interval:
            self._let_go(entry)

    def finish(self, reason: str, error: str | None, *, index: int | None = None) -> None:
        """The end of what has not ended yet, for one index or all."""
        for one in range(self.n) if index is None else (index,):
            if not self._ended[one]:
                entry = self._entries[one] or self._new_entry(one)
                self._end(entry, reason, error)
                self._let_go(entry)

    def drop_waiting(self) -> None:
        """What waits is no longer wanted; the ends that were not taken stay."""
        for entry in self._entries:
            if entry is not None:
                entry.offset += len(entry.tokens)
                entry.tokens, entry.logprobs = [], None
        self.num_waiting = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self.has_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    def cancel(self, index: int | None = None) -> None:
        """For the protocol see `front_client.Stream`."""
        if not (self.has_ended if index is None else self._ended[index]):
            self._on_cancel(self, index)

    def _take(self) -> Chunk:
        entry = self._ready.popleft()
        self._entries[entry.index] = None
        self._offsets[entry.index] = entry.offset + len(entry.tokens)
        self.num_waiting -= len(entry.tokens)
        last = entry.tokens[-1] if entry.tokens and entry.end == "stop" else None
        return Chunk(
            index=entry.index,
            offset=entry.offset,
            token_ids=tuple(entry.tokens),
            logprobs=None if entry.logprobs is None else tuple(entry.logprobs),
            finish_reason=entry.end,
            stop_reason=last if last in self._stop_token_ids else None,
            error=entry.error,
            num_cached_tokens=entry.num_cached,
            prompt_logprobs=entry.prompt_logprobs,
            kv_transfer_params=None if entry.kv_lent is None else entry.kv_lent.as_json(),
        )

    def _new_entry(self, index: int) -> _Entry:
        entry = self._entries[index] = _Entry(index, self._offsets[index], self._clock())
        return entry

    def _end(self, entry: _Entry, reason: str, error: str | None) -> None:
        entry.end, entry.error = reason, error
        self._ended[entry.index] = True
        self._num_ended += 1

    def _let_go(self, entry: _Entry) -> None:
        """The reader may take it; it is found at the end of the line once, however much it grows there."""
        if not entry.is_ready:
            entry.is_ready = True
            self._ready.append(entry)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
