"""Which prefixes are found again: full pages, equal tokens, equal salts, and nothing else."""

import hashlib
import struct
from itertools import count

import pytest

from runtime.requests.pages import PagePool
from runtime.requests.prefix import PrefixCache, chained_digest, root_digest
from runtime.requests.request import Request
from runtime.requests.sampling_params import SamplingParams

PAGE = 4
NUMBERS = count()


def make(tokens: list[int], *, salt: str = "") -> Request:
    number = next(NUMBERS)
    return Request(id=str(number), prompt=tuple(tokens), params=SamplingParams(), arrival=number, cache_salt=salt)


def computed(cache: PrefixCache, tokens: list[int], *, salt: str = "") -> Request:
    """A request whose tokens are all computed and published as far as pages are full."""
    request = make(tokens, salt=salt)
    request.pages = cache.pool.allocate(cache.pool.pages_for(len(tokens))) or []
    cache.publish(request, num_tokens=len(tokens))
    return request


def match(cache: PrefixCache, tokens: list[int], *, salt: str = "", max_tokens: int = 1000) -> list[int]:
    return cache.match(make(tokens, salt=salt), max_tokens=max_tokens)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(16, PAGE), model_salt="model")


def test_digest_is_chained_sha256_of_little_endian_ids() -> None:
    root = hashlib.sha256(b"\x02\0\0\0\0\0\0\0" + b"ab" + b"c").digest()
    assert root_digest(b"ab", b"c") == root
    assert chained_digest(root, [1, 258]) == hashlib.sha256(root + b"\1\0\0\0\0\0\0\0" + b"\2\1\0\0\0\0\0\0").digest()
    assert chained_digest(root, [2**40]) == hashlib.sha256(root + struct.pack("<q", 2**40)).digest()


def test_salts_do_not_run_into_each_other() -> None:
    assert root_digest(b"a", b"bc") != root_digest(b"ab", b"c")


def test_full_pages_are_found_in_order(cache: PrefixCache) -> None:
    first = computed(cache, list(range(12)))
    assert match(cache, list(range(12))) == first.pages
    assert match(cache, [*range(8), 99, 98, 97, 96]) == first.pages[:2]


@pytest.mark.parametrize("length", range(13))
def test_only_whole_pages_of_a_prefix_match(cache: PrefixCache, length: int) -> None:
    first = computed(cache, list(range(12)))
    assert match(cache, list(range(length))) == first.pages[: length // PAGE]
    assert match(cache, list(range(12)), max_tokens=length) == first.pages[: length // PAGE]


@pytest.mark.parametrize("length", range(9))
def test_only_full_pages_are_published(cache: PrefixCache, length: int) -> None:
    computed(cache, list(range(length)))
    assert len(match(cache, list(range(12)))) == length // PAGE


def test_equal_page_after_another_start_is_another_page(cache: PrefixCache) -> None:
    computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert match(cache, [5, 6, 7, 8]) == []
    assert match(cache, [9, 2, 3, 4, 5, 6, 7, 8]) == []


def test_order_of_tokens_counts(cache: PrefixCache) -> None:
    computed(cache, [1, 2, 3, 4])
    assert match(cache, [2, 1, 3, 4]) == []


def test_salts_keep_requests_apart(cache: PrefixCache) -> None:
    plain = computed(cache, [1, 2, 3, 4])
    salted = computed(cache, [1, 2, 3, 4], salt="tenant")
    assert match(cache, [1, 2, 3, 4]) == plain.pages
    assert match(cache, [1, 2, 3, 4], salt="tenant") == salted.pages
    assert match(cache, [1, 2, 3, 4], salt="other") == []
    assert set(plain.pages).isdisjoint(salted.pages)


def test_another_model_finds_nothing() -> None:
    pool = PagePool(4, PAGE)
    computed(PrefixCache(pool, model_salt="a"), [1, 2, 3, 4])
    assert match(PrefixCache(pool, model_salt="b"), [1, 2, 3, 4]) == []


def test_match_holds_nothing_until_it_is_taken(cache: PrefixCache) -> None:
    first = computed(cache, [1, 2, 3, 4])
    second = make([1, 2, 3, 4, 5])
    pages = cache.match(second, max_tokens=4)
    assert (pages, cache.pool.references(pages[0]), cache.num_queried) == (first.pages, 1, 0)
    cache.take(second, pages)
    assert (cache.pool.references(pages[0]), cache.num_queried, cache.num_hit) == (2, 5, 4)


def test_page_published_first_is_kept(cache: PrefixCache) -> None:
    first, second = computed(cache, [1, 2, 3, 4]), computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert first.pages[0] != second.pages[0]
    assert match(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == [first.pages[0], second.pages[1]]


def test_publishing_goes_on_where_it_stopped(cache: PrefixCache) -> None:
    request = make(list(range(10)))
    request.pages = cache.pool.allocate(3) or []
    for num_tokens, num_found in ((3, 0), (4, 1), (7, 1), (8, 2), (10, 2)):
        cache.publish(request, num_tokens=num_tokens)
        assert match(cache, list(range(12))) == request.pages[:num_found]


def test_evicted_page_ends_the_match(cache: PrefixCache) -> None:
    first = computed(cache, list(range(12)))
    pages = list(first.pages)
    cache.pool.release(pages)
    cache.pool.allocate(14)  # 13 were plain: the chain's last page goes
    assert match(cache, list(range(12))) == pages[:2]


def test_digests_are_computed_once_a_page(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "runtime.requests.prefix.chained_digest",
        lambda parent, ids: calls.append(len(ids)) or chained_digest(parent, ids),
    )
    request = computed(cache, list(range(12)))
    for _ in range(3):
        cache.match(request, max_tokens=12)
    request.tokens += [20, 21, 22, 23]
    cache.match(request, max_tokens=16)
    assert calls == [PAGE] * 4


def test_flush_forgets_every_prefix(cache: PrefixCache) -> None:
    first = computed(cache, [1, 2, 3, 4])
    cache.flush()
    assert match(cache, [1, 2, 3, 4]) == []
    assert cache.pool.references(first.pages[0]) == 1
    computed(cache, [1, 2, 3, 4])
    assert len(match(cache, [1, 2, 3, 4])) == 1


def test_switched_off_it_finds_publishes_and_counts_nothing() -> None:
    cache = PrefixCache(PagePool(4, PAGE), enabled=False)
    request = computed(cache, [1, 2, 3, 4])
    assert match(cache, [1, 2, 3, 4]) == []
    cache.take(request, [])
    assert (cache.num_queried, cache.num_hit, cache.pool.is_published(request.pages[0])) == (0, 0, False)
