"""A rank's side of the front: where its letters come in and its own go out, in this process or over a link.

Knows letters; does not know what a rank does with them (see `rank_loop`).
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..control.frames import Link
from ..loop.ranks import Item
from .letters import (
    AbortLetter,
    AdmitLetter,
    LetterError,
    LetterReader,
    ToFront,
    ToRank,
    WishLetter,
    item_of,
    send_letter,
)


class Mailbox(Protocol):
    """What a rank and the front say to each other."""

    def receive(self) -> ToRank:
        """The next letter; waits for it."""
        ...

    def take(self) -> Sequence[Item]:
        """The items that are here; never waits. Other letters do not come while a wave runs."""
        ...

    def say(self, letter: ToFront, /) -> None: ...


class LocalMailbox:
    """For the rank that lives in the front's own process; the front puts from any thread."""

    def __init__(self, say: Callable[[ToFront], None]) -> None:
        self._letters: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self.say = say

    def put(self, letter: ToRank) -> None:
        self._letters.put(letter)

    def receive(self) -> ToRank:
        """For the protocol see `Mailbox`."""
        return self._letters.get()

    def take(self) -> list[Item]:
        """For the protocol see `Mailbox`."""
        return [step_item(self._letters.get()) for _ in range(self._letters.qsize())]


class LinkMailbox:
    """For a rank in a process of its own; the link's other end is the front."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reader = LetterReader.at_rank()
        self._found: deque[ToRank] = deque()

    def receive(self) -> ToRank:
        """For the protocol see `Mailbox`. Raises LinkClosed when the front is gone."""
        while not self._found:
            self._keep(self._link.receive())
        return self._found.popleft()

    def take(self) -> list[Item]:
        """For the protocol see `Mailbox`."""
        for frame in self._link.receive_ready():
            self._keep(frame)
        return [step_item(self._found.popleft()) for _ in range(len(self._found))]

    def say(self, letter: ToFront) -> None:
        """For the protocol see `Mailbox`."""
        send_letter(self._link, letter)

    def _keep(self, frame: bytes) -> None:
        letter = self._reader.take(frame)
        if letter is not None:
            self._found.append(letter)  # type: ignore[arg-type]  # the reader is a rank's


def step_item(letter: ToRank) -> Item:
    """A letter as what a rank finds in its inbox. Raises LetterError for one that does not come while a wave runs."""
    if isinstance(letter, AdmitLetter | AbortLetter | WishLetter):
        return item_of(letter)
    raise LetterError(f"{type(letter).__name__} came while a wave runs")
