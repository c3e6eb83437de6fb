"""What is in the ranks' prefix caches, told to subscribers: first what is there, then every change, in one order.

The ranks number their events each for itself; here they get one line of numbers, for a subscriber follows one server.
The last events are kept. Every subscriber has a place in them, not a queue of its own: one that falls behind costs no
memory, and starts again from what is there.

    kept   | 17 18 19 20 21 |         subscribers at 18 and at 21; one at 9 is told everything anew

Knows messages and the group's events; does not know calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from smg_grpc_proto.generated import common_pb2

from ..front.front_client import KvEvents, RankLoad, StoredBlock

KEPT = 4096
BLOCKS_A_MESSAGE = 256
LOAD_INTERVAL_S = 0.5


class KvRelay:
    """Hears the group's events once, and tells them to any number of subscribers."""

    def __init__(self, *, block_size: int, loads: Callable[[], Sequence[RankLoad]], max_running: int) -> None:
        self._block_size = block_size
        self._loads = loads
        self._max_running = max_running
        self._blocks: dict[int, dict[int, StoredBlock]] = {}
        self._kept: deque[common_pb2.KvEventBatch] = deque(maxlen=KEPT)
        self._sequence = 0
        self._num_events = 0
        self._news = asyncio.Event()

    async def follow(self, events: AsyncIterator[KvEvents]) -> None:
        """Take the group's events until they end."""
        async for event in events:
            self.take(event)

    def take(self, event: KvEvents) -> None:
        """Keep one rank's event, cut so that no message grows past a bound."""
        if not (event.cleared or event.removed or event.stored):
            return
        held = self._blocks.setdefault(event.rank, {})
        if event.cleared:
            held.clear()
            self._keep(event.rank, [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())])
        for begin in range(0, len(event.removed), BLOCKS_A_MESSAGE):
            gone = event.removed[begin : begin + BLOCKS_A_MESSAGE]
            for block_hash in gone:
                held.pop(block_hash, None)
            removed = common_pb2.KvBlocksRemoved(block_hashes=gone, tier=common_pb2.KV_CACHE_TIER_DEVICE)
            self._keep(event.rank, [common_pb2.KvCacheEvent(removed=removed)])
        for begin in range(0, len(event.stored), BLOCKS_A_MESSAGE):
            stored = event.stored[begin : begin + BLOCKS_A_MESSAGE]
            held.update((block.block_hash, block) for block in stored)
            self._keep(event.rank, self._stored_events(stored))
        self._news.set()
        self._news = asyncio.Event()

    def _keep(self, rank: int, events: Iterable[common_pb2.KvCacheEvent]) -> None:
        self._sequence += 1
        batch = common_pb2.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), dp_rank=rank)
        for event in events:
            self._num_events += 1
            event.event_id = self._num_events
            batch.events.append(event)
        self._kept.append(batch)

    def _stored_events(self, blocks: Sequence[StoredBlock]) -> list[common_pb2.KvCacheEvent]:
        """One event a chain: blocks of which each follows the one before."""
        events: list[common_pb2.KvCacheEvent] = []
        before: int | None = None
        for block in blocks:
            if not events or block.parent_hash is None or block.parent_hash != before:
                stored = common_pb2.KvBlocksStored(
                    parent_block_hash=block.parent_hash, tier=common_pb2.KV_CACHE_TIER_DEVICE
                )
                events.append(common_pb2.KvCacheEvent(stored=stored))
            events[-1].stored.blocks.add(
                block_hash=block.block_hash, token_ids=block.token_ids, block_size=self._block_size
            )
            before = block.block_hash
        return events

    async def subscribe(self, start: int, *, loads_first: bool) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Batches from number `start` on, or from what is there when `start` is 0 or no longer kept.

        Between them, every LOAD_INTERVAL_S, the ranks' loads; before the first batch only if `loads_first`.
        """
        place, sample = self._place(start), 0
        while True:
            if place is None:
                place = self._sequence + 1  # before any is told: the subscriber may take its time with them
                for batch in self._snapshot():
                    yield batch
            while place <= self._sequence and (batch := self._at(place)) is not None:
                yield batch
                place += 1
            if place <= self._sequence:
                place = None  # fell behind what is kept
                continue
            news = self._news
            try:
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await news.wait()
            except TimeoutError:
                if place > 1 or loads_first:
                    for load in self._loads():
                        sample += 1
                        yield self._load_only(load, place - 1, sample)

    def _place(self, start: int) -> int | None:
        """Where a subscriber goes on; None where it must be told what is there."""
        if start == 0:
            return None if self._sequence else 1
        oldest = self._kept[0].sequence_number if self._kept else self._sequence + 1
        return start if oldest <= start <= self._sequence + 1 else None

    def _at(self, number: int) -> common_pb2.KvEventBatch | None:
        oldest = self._kept[0].sequence_number
        return self._kept[number - oldest] if number >= oldest else None

    def _snapshot(self) -> list[common_pb2.KvEventBatch]:
        """All blocks, rank by rank. Its numbers end at the last one given: no message held more blocks than one here
        does, so there were at least as many."""
        batches = []
        for rank, held in sorted(self._blocks.items()):
            blocks = list(held.values())
            cuts = [blocks[begin : begin + BLOCKS_A_MESSAGE] for begin in range(0, len(blocks), BLOCKS_A_MESSAGE)]
            for index, cut in enumerate(cuts or [[]]):
                events = self._stored_events(cut)
                if index == 0:
                    events.insert(0, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))
                chunk = common_pb2.KvSnapshotChunk(index=index, count=len(cuts) or 1, blocks=len(blocks))
                batches.append(
                    common_pb2.KvEventBatch(timestamp=time.time(), events=events, dp_rank=rank, snapshot=chunk)
                )
        for number, batch in enumerate(batches, start=self._sequence - len(batches) + 1):
            batch.sequence_number = number
        return batches

    def _load_only(self, load: RankLoad, sequence: int, sample: int) -> common_pb2.KvEventBatch:
        record = common_pb2.EngineLoad(
            running_requests=load.running,
            waiting_requests=load.waiting,
            waiting_uncached_tokens=load.waiting_tokens,
            token_usage=load.used_pages / max(load.num_pages, 1),
            gen_throughput=load.gen_tokens_per_s,
            max_running_requests=self._max_running,
            cache_hit_rate=load.prefix_hit_rate,
            sample=sample,
            load_only=True,
        )
        return common_pb2.KvEventBatch(sequence_number=sequence, timestamp=time.time(), dp_rank=load.rank, load=record)
