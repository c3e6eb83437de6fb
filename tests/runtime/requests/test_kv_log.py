"""Of all that happened to a cache between two questions, the log tells what is left of it."""

from __future__ import annotations

import random

from runtime.requests.kv_log import KvLetter, KvLog, KvStored, block_hash
from runtime.requests.pages import PagePool
from runtime.requests.prefix import PrefixCache, chained_digest, root_digest
from runtime.requests.request import Request
from runtime.requests.sampling_params import SamplingParams

A, B = b"a" * 32, b"b" * 32


def test_nothing_changed_is_nothing_to_tell():
    assert KvLog().take() is None


def test_what_is_stored_is_told_with_the_page_before_it_and_once():
    log = KvLog()
    log.stored(A, None, [1, 2])
    log.stored(B, A, [3, 4])
    first = KvStored(block_hash(A), None, (1, 2))
    assert log.take() == KvLetter(1, False, (), (first, KvStored(block_hash(B), block_hash(A), (3, 4))))
    assert log.take() is None


def test_what_came_and_went_is_not_mentioned():
    log = KvLog()
    log.stored(A, None, [1])
    log.removed(A)
    assert log.take() is None


def test_what_went_and_came_back_is_told_as_both():
    log = KvLog()
    log.removed(A)
    log.stored(A, None, [1])
    assert log.take() == KvLetter(1, False, (block_hash(A),), (KvStored(block_hash(A), None, (1,)),))


def test_a_clear_leaves_only_what_came_after_it_and_numbers_go_on():
    log = KvLog()
    log.removed(A)
    assert log.take() is not None
    log.stored(A, None, [1])
    log.cleared()
    log.stored(B, None, [2])
    assert log.take() == KvLetter(2, True, (), (KvStored(block_hash(B), None, (2,)),))


def test_a_reader_of_the_letters_knows_what_the_cache_can_find():
    log = KvLog()
    pool = PagePool(6, 2, on_evict=log.removed)
    prefix = PrefixCache(pool, log=log)
    rng, known, asked = random.Random(3), set(), []
    for turn in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.choice([2, 4, 6]))]
        request = Request(id=str(turn), prompt=tuple(tokens), params=SamplingParams(), arrival=turn)
        found = prefix.match(request, max_tokens=len(tokens))
        prefix.take(request, found)
        fresh = pool.allocate(len(tokens) // 2 - len(found))
        assert fresh is not None
        request.pages, request.num_published = found + fresh, len(found)
        prefix.publish(request, num_tokens=len(tokens))
        pool.release(request.pages)
        if turn % 50 == 49:
            prefix.flush()
        digest = root_digest(b"", b"")
        for start in range(0, len(tokens), 2):
            digest = chained_digest(digest, tokens[start : start + 2])
            asked.append(digest)
        if rng.random() < 0.4 and (letter := log.take()) is not None:
            known = (set() if letter.cleared else known - set(letter.removed)) | {b.block_hash for b in letter.stored}
            assert {block_hash(one) for one in asked if pool.find(one) is not None} == known
    assert pool.num_evictions > 20
