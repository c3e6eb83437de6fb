"""What the ranks of one process hand in for one collective: compare it, then copy it. No threads, no waiting.

Who is to blame when ranks differ is decided here: the smaller party; between parties of the same size the one that
came later.

Legend: R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .errors import ExchangeMismatch, TagMismatch, TransportError
from .transport import Tag

V = TypeVar("V", bound=Hashable)

Fault = Callable[..., TransportError]
"""Makes the error of one rank: fault(rank=..., step=...)."""


@dataclass(slots=True, eq=False)
class Post:
    """One rank's part of an all_to_all (recv and splits given) or of an all_gather (neither)."""

    tag: Tag
    send: Tensor
    recv: Tensor | None = None
    send_splits: tuple[int, ...] = ()
    recv_splits: tuple[int, ...] = ()

    @property
    def form(self) -> tuple[str, torch.dtype, torch.Size]:
        """What must be alike on every rank besides the tag: operation, dtype, shape of what is sent (of one row)."""
        if self.recv is None:
            return "all_gather", self.send.dtype, self.send.shape
        return "all_to_all", self.send.dtype, self.send.shape[1:]


class Collective:
    """One exchange from the first post to the last."""

    def __init__(self, size: int) -> None:
        self.arrival: list[int] = []  # ranks in the order of posting
        self._posts: list[Post | None] = [None] * size

    def add(self, rank: int, post: Post) -> bool:
        """True with the last one."""
        self._posts[rank] = post
        self.arrival.append(rank)
        return len(self.arrival) == len(self._posts)

    @property
    def tag(self) -> Tag:
        """Where the first to come believes to be."""
        first = self._posts[self.arrival[0]]
        assert first is not None
        return first.tag

    def complete(self) -> Fault | None:
        """Compare all posts, then copy: every post's recv holds what its rank gets. Or what makes it impossible."""
        posts = [post for post in self._posts if post is not None]
        fault = find_fault(posts, self.arrival)
        if fault is not None:
            return fault
        if posts[0].recv is None:
            for post, rows in zip(posts, gather_all(posts), strict=True):
                post.recv = rows
        else:
            copy_all(posts)
        return None


def odd_one_out(values: Sequence[V], arrival: Sequence[int]) -> tuple[int, V] | None:
    """(culprit, what it should have been), or None when values, one a rank, are all the same.

    `arrival` lists the ranks in the order in which they came.
    """
    if all(value == values[0] for value in values):
        return None
    parties = Counter(values[rank] for rank in arrival)
    expected, _ = max(parties.items(), key=lambda party: party[1])  # the first of equals: it came first
    return next(rank for rank in reversed(arrival) if values[rank] != expected), expected


def find_fault(posts: Sequence[Post], arrival: Sequence[int]) -> Fault | None:
    """What makes this collective impossible, or None. `posts` by rank, `arrival` in the order of posting."""
    odd = odd_one_out([post.tag for post in posts], arrival)
    if odd is not None:
        return partial(TagMismatch, odd[0], odd[1], posts[odd[0]].tag)
    odd = odd_one_out([post.form for post in posts], arrival)
    if odd is not None:
        cause = f"{posts[odd[0]].tag}: expected {_words(odd[1])}, found {_words(posts[odd[0]].form)}"
        return partial(ExchangeMismatch, odd[0], cause)
    if posts[0].recv is None:
        return None
    return _find_split_fault(posts, arrival)


def _words(form: tuple[str, torch.dtype, torch.Size]) -> str:
    name, dtype, shape = form
    return f"{name} of {dtype} {list(shape)}"


def _find_split_fault(posts: Sequence[Post], arrival: Sequence[int]) -> Fault | None:
    sent = list(zip(*(post.send_splits for post in posts), strict=True))  # [destination][source]
    expected = [post.recv_splits for post in posts]
    if sent == expected:
        return None
    wrong = [
        (source, destination)
        for destination in range(len(posts))
        for source in range(len(posts))
        if sent[destination][source] != expected[destination][source]
    ]
    blame = Counter(rank for pair in wrong for rank in set(pair))
    culprit = max(reversed(arrival), key=lambda rank: blame[rank])
    source, destination = next(pair for pair in wrong if culprit in pair)
    cause = (
        f"{posts[0].tag}: rank {source} sends {sent[destination][source]} rows to rank {destination}, "
        f"which expects {expected[destination][source]}"
    )
    return partial(ExchangeMismatch, culprit, cause)


def copy_all(posts: Sequence[Post]) -> None:
    """Move the rows of one all_to_all: all into one heap, from there to each rank; few calls however many ranks.

    Works whether or not the ranks' threads are in inference mode.
    """
    with torch.inference_mode():
        heap = torch.cat([post.send for post in posts])
        for post, rows in zip(posts, rows_of_heap(tuple(post.send_splits for post in posts)), strict=True):
            assert post.recv is not None
            torch.index_select(heap, 0, rows.to(heap.device), out=post.recv)


@lru_cache(maxsize=16)  # the counts' exchange has the same splits always, a benchmark's rows too
def rows_of_heap(send_splits: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Which rows of the heap, ordered by (source, destination), each destination gets: those for it, by source.

    splits ((0, 1), (2, 0))    heap s0d1 s1d0 s1d0    -> [1, 2] and [0]
    """
    counts_SD = np.array(send_splits)
    begin_SD = counts_SD.cumsum().reshape(counts_SD.shape) - counts_SD
    counts = counts_SD.T.ravel()
    moved = begin_SD.T.ravel() - (counts.cumsum() - counts)
    order = torch.from_numpy(moved.repeat(counts) + np.arange(counts.sum()))
    return order.split(counts_SD.sum(axis=0).tolist())


def gather_all(posts: Sequence[Post]) -> list[Tensor]:
    """One [R, *row] for each rank, none sharing memory with another, none an inference tensor."""
    with torch.inference_mode(False):
        rows = torch.stack([post.send for post in posts])
        return [rows, *(rows.clone() for _ in posts[1:])]
