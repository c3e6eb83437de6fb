import asyncio

import pytest

from launch.front.front_client import KvEvents, StoredBlock
from launch.service import grpc_kv_events
from launch.service.grpc_kv_events import KvRelay

pytestmark = pytest.mark.timeout(120)


def block(number: int, parent: int | None = None) -> StoredBlock:
    return StoredBlock(block_hash=number, parent_hash=parent, token_ids=(number,) * 4)


def stored(rank: int, *numbers: int) -> KvEvents:
    """A chain."""
    pairs = zip((None, *numbers), numbers, strict=False)
    return KvEvents(rank=rank, sequence=0, stored=tuple(block(number, parent) for parent, number in pairs))


def relay() -> KvRelay:
    return KvRelay(block_size=4, loads=lambda: (), max_running=4)


async def heard(relay: KvRelay, start: int = 0, *, count: int) -> list:
    batches = relay.subscribe(start, loads_first=False)
    try:
        async with asyncio.timeout(20):
            return [await anext(batches) for _ in range(count)]
    finally:
        await batches.aclose()


def believed(batches: list) -> dict[int, set[int]]:
    """What a subscriber takes the ranks' caches to hold."""
    held: dict[int, set[int]] = {}
    for batch in batches:
        for event in batch.events:
            blocks = held.setdefault(batch.dp_rank, set())
            if event.HasField("cleared"):
                blocks.clear()
            blocks |= {each.block_hash for each in event.stored.blocks}
            blocks -= set(event.removed.block_hashes)
    return held


def run(body):
    return asyncio.run(body)


def test_a_late_subscriber_is_told_what_is_there_and_then_what_changes():
    async def body():
        one = relay()
        for event in (stored(0, 1, 2), stored(1, 5), KvEvents(rank=0, sequence=0, removed=(2,)), stored(1, 6)):
            one.take(event)
        told = await heard(one, count=2)
        assert believed(told) == {0: {1}, 1: {5, 6}}
        assert [batch.sequence_number for batch in told] == [3, 4]
        assert [(b.snapshot.index, b.snapshot.count, b.snapshot.blocks) for b in told] == [(0, 1, 1), (0, 1, 2)]
        assert all(event.event_id == 0 for batch in told for event in batch.events)

    run(body())


def test_a_subscriber_goes_on_where_it_was():
    async def body():
        one = relay()
        for number in range(1, 6):
            one.take(stored(0, number))
        told = await heard(one, 4, count=2)
        assert [(b.sequence_number, believed([b])) for b in told] == [(4, {0: {4}}), (5, {0: {5}})]
        # A number that was never given, as after a restart of the server: everything anew.
        assert believed(await heard(one, 900, count=1)) == {0: {1, 2, 3, 4, 5}}

    run(body())


def test_who_falls_behind_what_is_kept_starts_again_from_what_is_there(monkeypatch):
    monkeypatch.setattr(grpc_kv_events, "KEPT", 3)

    async def body():
        one = relay()
        batches = one.subscribe(0, loads_first=False)
        one.take(stored(0, 1))
        told = [await anext(batches)]
        for number in range(2, 12):
            one.take(stored(0, number))
        one.take(KvEvents(rank=0, sequence=0, removed=(1, 7)))
        told.append(await anext(batches))
        assert believed(told) == {0: set(range(2, 12)) - {7}}
        assert told[-1].HasField("snapshot")
        one.take(stored(0, 50))
        told.append(await anext(batches))
        assert believed(told) == {0: (set(range(2, 12)) | {50}) - {7}}
        await batches.aclose()

    run(body())


def test_no_message_grows_past_its_bound_and_chains_stay_chains(monkeypatch):
    monkeypatch.setattr(grpc_kv_events, "BLOCKS_A_MESSAGE", 4)

    async def body():
        one = relay()
        one.take(stored(0, *range(1, 11)))
        one.take(KvEvents(rank=0, sequence=0, stored=(block(20, 3), block(21, 20), block(30))))
        live = await heard(one, 1, count=4)
        assert [len(batch.events[0].stored.blocks) for batch in live] == [4, 4, 2, 2]
        parents = [
            [e.stored.parent_block_hash for e in batch.events if e.stored.HasField("parent_block_hash")]
            for batch in live
        ]
        assert parents == [[], [4], [8], [3]]
        assert len(live[3].events) == 2
        snapshot = await heard(one, count=4)
        assert [(b.snapshot.index, b.snapshot.count, b.sequence_number) for b in snapshot] == [
            (0, 4, 1), (1, 4, 2), (2, 4, 3), (3, 4, 4),
        ]  # fmt: skip
        assert believed(snapshot) == {0: {*range(1, 11), 20, 21, 30}}

    run(body())


def test_what_says_nothing_is_not_numbered():
    async def body():
        one = relay()
        one.take(KvEvents(rank=3, sequence=1))
        one.take(KvEvents(rank=0, sequence=1, cleared=True))
        [told] = await heard(one, 1, count=1)
        assert (told.sequence_number, told.dp_rank) == (1, 0)
        assert told.events[0].HasField("cleared")

    run(body())
