"""Who is blamed when ranks differ, and where rows go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep import ExchangeMismatch, Kind, Tag, TagMismatch
from ep.posts import Post, find_fault, odd_one_out, rows_of_heap

TAG = Tag(1, 2, 0, 0, Kind.CHECK)
OTHER = Tag(1, 3, 0, 0, Kind.CHECK)


@pytest.mark.parametrize(
    ("values", "arrival", "culprit", "expected"),
    [
        ("aaba", [0, 1, 2, 3], 2, "a"),
        ("ab", [0, 1], 1, "a"),
        ("ab", [1, 0], 0, "b"),
        ("aabb", [2, 0, 3, 1], 1, "b"),
        ("abb", [0, 1, 2], 0, "b"),
        ("abc", [0, 2, 1], 1, "a"),
    ],
)
def test_the_smaller_party_is_to_blame_and_of_equals_the_later(values, arrival, culprit, expected):
    assert odd_one_out(values, arrival) == (culprit, expected)


def test_nobody_is_to_blame_when_all_are_alike():
    assert odd_one_out("aaa", [2, 0, 1]) is None


def post(send_splits, recv_splits, *, tag=TAG, dtype=torch.float32, width=2):
    send = torch.zeros(sum(send_splits), width, dtype=dtype)
    recv = torch.zeros(sum(recv_splits), width, dtype=dtype)
    return Post(tag, send, recv, send_splits, recv_splits)


def fault_of(posts):
    fault = find_fault(posts, range(len(posts)))
    assert fault is not None
    return fault(rank=0, step=1)


def test_like_posts_have_no_fault():
    assert find_fault([post((1, 2), (1, 0)), post((0, 3), (2, 3))], [0, 1]) is None


def test_another_tag_is_found_before_all_else():
    error = fault_of([post((1, 1), (1, 1)), post((9, 9), (9, 9), tag=OTHER, dtype=torch.float64)])
    assert isinstance(error, TagMismatch)
    assert (error.culprit, error.expected, error.found) == (1, TAG, OTHER)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (post((1, 1, 1), (1, 1, 1), dtype=torch.float64), "expected all_to_all of torch.float32 [2], found all_to_all"),
        (post((1, 1, 1), (1, 1, 1), width=3), "found all_to_all of torch.float32 [3]"),
        (Post(TAG, torch.zeros(3, 2)), "found all_gather of torch.float32 [3, 2]"),
    ],
    ids=["dtype", "shape", "operation"],
)
def test_another_dtype_shape_or_operation_is_named(odd, words):
    like = post((1, 1, 1), (1, 1, 1))
    error = fault_of([like, odd, like])
    assert isinstance(error, ExchangeMismatch)
    assert error.culprit == 1
    assert words in error.cause


def test_all_gather_takes_rows_of_one_shape_only():
    error = fault_of([Post(TAG, torch.zeros(2)), Post(TAG, torch.zeros(2)), Post(TAG, torch.zeros(3))])
    assert error.culprit == 2


def test_the_rank_that_differs_from_most_in_its_splits_is_named_with_both_counts():
    error = fault_of([post((1, 1, 1), (1, 1, 1)), post((2, 1, 2), (1, 1, 1)), post((1, 1, 1), (1, 1, 1))])
    assert isinstance(error, ExchangeMismatch)
    assert error.culprit == 1
    assert "rank 1 sends 2 rows to rank 0, which expects 1" in error.cause


@st.composite
def split_matrices(draw):
    size = draw(st.integers(1, 6))
    row = st.tuples(*[st.integers(0, 4)] * size)
    return tuple(draw(row) for _ in range(size))


@given(split_matrices())
def test_each_destination_gets_its_rows_by_source(splits):
    heap = [(s, d, n) for s, row in enumerate(splits) for d, count in enumerate(row) for n in range(count)]
    for destination, rows in enumerate(rows_of_heap(splits)):
        expected = [place for place in sorted(heap) if place[1] == destination]
        assert [heap[row] for row in rows.tolist()] == expected


def test_rows_of_heap_by_hand():
    first, second = rows_of_heap(((0, 1), (2, 0)))
    assert (first.tolist(), second.tolist()) == ([1, 2], [0])
