"""What the front door has heard of its ranks: how each is, and what each one's prefix cache holds.

Knows reports and cache letters; does not know requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from runtime.requests.kv_log import KvLetter, KvStored
from runtime.requests.telemetry import RankStats

from .front_client import KvEvents, RankLoad, RankState, StoredBlock

MOST_WAITING = 256
"""Events that wait for a subscriber; one that falls behind is told everything anew instead."""


class RankReports:
    """The last report of each rank, and how fast each one is."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stats: list[RankStats | None] = [None] * size
        self._at = [0.0] * size
        self._rates = [0.0] * size
        self._stepped: list[float | None] = [None] * size

    @property
    def stats(self) -> tuple[RankStats, ...]:
        """Of the ranks that have reported."""
        return tuple([stats for stats in self._stats if stats is not None])

    def hear(self, rank: int, stats: RankStats) -> None:
        """A rank says how it is."""
        now, before = self._clock(), self._stats[rank]
        if before is not None and now > self._at[rank]:
            self._rates[rank] = (stats.generated_tokens - before.generated_tokens) / (now - self._at[rank])
        if before is None or stats.steps > before.steps:
            self.stepped(rank)
        self._stats[rank], self._at[rank] = stats, now

    def stepped(self, rank: int) -> None:
        """A step of this rank has come to its end."""
        self._stepped[rank] = self._clock()

    def idle(self) -> None:
        """No rank runs."""
        self._rates = [0.0] * len(self._rates)

    def last_step_age(self, *, busy_since: float | None) -> float | None:
        """Seconds since any rank finished a step; 0 while there is nothing to do, None before the first."""
        known = [at for at in self._stepped if at is not None]
        if busy_since is None:
            return 0.0 if known else None
        return self._clock() - max([*known, busy_since])

    def loads(self, states: Sequence[RankState], queued_tokens: Sequence[int]) -> tuple[RankLoad, ...]:
        """Every rank that has reported."""
        return tuple([self._load(stats, states[stats.rank], queued_tokens[stats.rank]) for stats in self.stats])

    def _load(self, stats: RankStats, state: RankState, queued_tokens: int) -> RankLoad:
        stepped = self._stepped[stats.rank]
        return RankLoad(
            rank=stats.rank,
            state=state,
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=queued_tokens,
            used_pages=stats.num_pages - stats.free_pages,
            num_pages=stats.num_pages,
            gen_tokens_per_s=self._rates[stats.rank],
            prefix_hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
            last_step_age_s=None if stepped is None else self._clock() - stepped,
            beat_wait_s=stats.beat_wait_s,
        )


class CacheMirror:
    """What can be found in each rank's prefix cache, as it was told, and who wants to be told on."""

    def __init__(self, size: int) -> None:
        self._held: list[dict[int, KvStored]] = [{} for _ in range(size)]
        self._sequences = [0] * size
        self._feeds: set[CacheFeed] = set()

    def hear(self, rank: int, letter: KvLetter) -> None:
        """A rank says what changed."""
        held = self._held[rank]
        if letter.cleared:
            held.clear()
        for name in letter.removed:
            held.pop(name, None)
        held.update({block.block_hash: block for block in letter.stored})
        self._sequences[rank] = letter.sequence
        if self._feeds:
            events = _events(rank, letter.sequence, letter.stored, removed=letter.removed, cleared=letter.cleared)
            for feed in self._feeds:
                feed.push(events)

    def subscribe(self) -> CacheFeed:
        """What is there, then what changes."""
        feed = CacheFeed(self.state, self._feeds.discard)
        self._feeds.add(feed)
        return feed

    def state(self) -> list[KvEvents]:
        """All that is there, as of the last sequence number of each rank."""
        return [
            _events(rank, sequence, tuple(held.values()), cleared=True)
            for rank, (sequence, held) in enumerate(zip(self._sequences, self._held, strict=True))
        ]

    def end(self) -> None:
        """Nothing more will be told."""
        for feed in self._feeds:
            feed.end()


class CacheFeed:
    """One subscriber's events; leaves of itself when its iteration is closed."""

    def __init__(self, state: Callable[[], list[KvEvents]], leave: Callable[[CacheFeed], None]) -> None:
        self._state = state
        self._leave = leave
        self._waiting = deque(state())
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def push(self, events: KvEvents) -> None:
        """One more; when too many wait, all are dropped for the state as it is now."""
        self._waiting.append(events)
        if len(self._waiting) > MOST_WAITING:
            self._waiting = deque(self._state())
        self._wake()

    def end(self) -> None:
        """After what waits nothing follows."""
        self._ended = True
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KvEvents:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:  # the reader leaves
                self._leave(self)
                raise
        return self._waiting.popleft()

    async def aclose(self) -> None:
        """The reader leaves."""
        self._leave(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _events(
    rank: int, sequence: int, stored: Sequence[KvStored], *, removed: tuple[int, ...] = (), cleared: bool = False
) -> KvEvents:
    blocks = tuple(
        [StoredBlock(block_hash=b.block_hash, parent_hash=b.parent_hash, token_ids=b.token_ids) for b in stored]
    )
    return KvEvents(rank=rank, sequence=sequence, stored=blocks, removed=removed, cleared=cleared)
