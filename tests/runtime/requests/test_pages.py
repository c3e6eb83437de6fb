"""The page pool against hand-written lists, and against a naive pool under random use."""

import random

import pytest

from runtime.requests.pages import PagePool


def key(name: str) -> bytes:
    return name.encode()


def test_new_pool_hands_out_every_page_once() -> None:
    pool = PagePool(5, 16)
    pages = pool.allocate(5)
    assert pages is not None
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.allocate(1)) == (0, None)


def test_too_large_a_wish_changes_nothing() -> None:
    pool = PagePool(3, 16)
    assert pool.allocate(1) == [0]
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(2) == [1, 2]


def test_no_pages_are_an_ordinary_wish() -> None:
    pool = PagePool(1, 16)
    assert pool.allocate(0) == []
    pool.release([])
    assert pool.num_free == 1


def test_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.retain(pages)
    pool.release(pages)
    assert (pool.references(0), pool.allocate(1)) == (1, None)
    pool.release(pages)
    assert (pool.references(0), pool.allocate(1)) == (0, [0])


def test_releasing_too_often_is_our_own_mistake() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="page 0 was released more often than it was held"):
        pool.release(pages)


def test_published_page_is_found_while_held_and_after() -> None:
    pool = PagePool(2, 16)
    assert pool.allocate(1) == [0]
    assert pool.publish(0, key("a"))
    assert pool.find(key("a")) == 0
    pool.release([0])
    assert (pool.find(key("a")), pool.num_free, pool.num_cached) == (0, 2, 1)
    pool.retain([0])
    assert (pool.references(0), pool.num_free, pool.num_cached) == (1, 1, 0)


def test_plain_pages_are_handed_out_before_cached_ones() -> None:
    pool = PagePool(3, 16)
    assert pool.allocate(2) == [0, 1]
    pool.publish(0, key("a"))
    pool.release([0, 1])
    assert pool.allocate(2) == [1, 2]
    assert pool.find(key("a")) == 0
    assert pool.allocate(1) == [0]
    assert (pool.find(key("a")), pool.num_evictions) == (None, 1)


def test_cached_page_released_longest_ago_is_evicted_first() -> None:
    pool = PagePool(3, 16)
    assert pool.allocate(3) == [0, 1, 2]
    for page in range(3):
        pool.publish(page, key(str(page)))
    for page in (1, 0, 2):
        pool.release([page])
    pool.retain([1])  # used again: now the newest
    pool.release([1])
    assert [pool.allocate(1) for _ in range(3)] == [[0], [2], [1]]


def test_end_of_a_chain_is_evicted_before_its_start() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(3)
    assert pages == [0, 1, 2]
    for page in pages:
        pool.publish(page, key(str(page)))
    pool.release(pages)
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [0]]


def test_second_page_of_equal_content_stays_unpublished() -> None:
    pool = PagePool(2, 16)
    assert pool.allocate(2) == [0, 1]
    assert pool.publish(0, key("a"))
    assert not pool.publish(1, key("a"))
    assert (pool.find(key("a")), pool.is_published(1)) == (0, False)
    pool.release([0, 1])
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_forgetting_keeps_holders_and_drops_keys() -> None:
    pool = PagePool(3, 16)
    assert pool.allocate(2) == [0, 1]
    pool.publish(0, key("a"))
    pool.publish(1, key("b"))
    pool.release([1])
    pool.forget()
    assert (pool.find(key("a")), pool.find(key("b")), pool.references(0)) == (None, None, 1)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert sorted(pool.allocate(2) or []) == [1, 2]


def test_pages_held_by_somebody_else_do_not_come_back() -> None:
    pool = PagePool(4, 16)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.retain([0, 1])
    assert pool.num_held_only_by([[0, 2]]) == 1
    assert pool.num_held_only_by([[0, 2], [0, 1, 3]]) == 3
    assert pool.num_held_only_by([]) == 0


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (7, 1), (8, 2), (14, 2), (15, 3)])
def test_last_page_may_be_partly_filled(num_tokens: int, num_pages: int) -> None:
    assert PagePool(4, 7).pages_for(num_tokens) == num_pages


@pytest.mark.parametrize(("num_pages", "page_size", "name"), [(0, 16, "num_pages"), (4, 0, "page_size")])
def test_empty_pool_is_refused(num_pages: int, page_size: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1, e.g. 64"):
        PagePool(num_pages, page_size)


class NaivePool:
    """The same promises, kept by looking at everything: a list of holders, and one list in the order of release."""

    def __init__(self, num_pages: int) -> None:
        self.references = dict.fromkeys(range(num_pages), 0)
        self.keys: dict[int, bytes] = {}
        self.released: list[int] = []

    def evicted_for(self, count: int) -> list[int]:
        free = [page for page, held in self.references.items() if not held]
        num_plain = sum(page not in self.keys for page in free)
        cached = [page for page in self.released if page in self.keys and not self.references[page]]
        return cached[: max(0, count - num_plain)]


@pytest.mark.parametrize("seed", range(20))
def test_random_use_agrees_with_a_naive_pool(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.randrange(1, 12)
    pool, naive = PagePool(num_pages, 4), NaivePool(num_pages)
    holdings: list[list[int]] = []
    for move in range(400):
        choice = rng.random()
        if choice < 0.4:
            _allocate(pool, naive, holdings, rng.randrange(4))
        elif choice < 0.6 and holdings:
            _release(pool, naive, holdings.pop(rng.randrange(len(holdings))))
        elif choice < 0.8 and holdings:
            _publish(pool, naive, rng.choice(holdings), key(str(move % 7)))
        elif naive.keys:
            _fork(pool, naive, holdings, rng.choice(sorted(naive.keys.values())))
        assert pool.num_free == sum(not held for held in naive.references.values())
        assert [pool.references(page) for page in range(num_pages)] == list(naive.references.values())
        for page, name in naive.keys.items():
            assert pool.find(name) == page


def _allocate(pool: PagePool, naive: NaivePool, holdings: list[list[int]], count: int) -> None:
    evicted = naive.evicted_for(count)
    num_free = sum(not held for held in naive.references.values())
    pages = pool.allocate(count)
    assert (pages is None) == (count > num_free)
    if pages is None:
        return
    assert all(naive.references[page] == 0 for page in pages)
    assert {page for page in pages if page in naive.keys} == set(evicted)
    for page in pages:
        naive.references[page] = 1
        naive.keys.pop(page, None)
    holdings.append(pages)


def _release(pool: PagePool, naive: NaivePool, pages: list[int]) -> None:
    pool.release(pages)
    for page in reversed(pages):
        naive.references[page] -= 1
        if page in naive.released:
            naive.released.remove(page)
        naive.released.append(page)


def _publish(pool: PagePool, naive: NaivePool, pages: list[int], name: bytes) -> None:
    unnamed = [page for page in pages if page not in naive.keys]
    if not unnamed:
        return
    assert pool.publish(unnamed[0], name) == (name not in naive.keys.values())
    if name not in naive.keys.values():
        naive.keys[unnamed[0]] = name


def _fork(pool: PagePool, naive: NaivePool, holdings: list[list[int]], name: bytes) -> None:
    page = pool.find(name)
    assert page is not None
    pool.retain([page])
    naive.references[page] += 1
    holdings.append([page])
