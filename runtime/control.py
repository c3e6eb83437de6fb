"""The control plane: one row of integers from every rank to every rank, over a star of its own, apart from the data.

    size <= group_size      hub 0 -+- 1          two levels      hub 0 -+- 1 .. 63
                                   +- 2                                 +- leader 64  --- 65 .. 127
                                   +- 3                                 +- leader 128 --- 129 .. 191

Rows travel up, the whole matrix travels down. No thread works behind anybody's back: `gather` sends this rank's row at
once, `wait` does the rest, and the hub and the leaders pass things on in their own `wait`. Knows integers and links; does
not know what a row means. How the links come about is `stars`.

Legend: R ranks, W integers in a row.

    up      | culprit | rows of the ranks below and of this one, each sequence + W |      int64 each
    down    | culprit | rows of all ranks in rank order |

`culprit` is 0, or 1 + the rank whose link is dead: what a hub or leader finds, all are told before they end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ep.errors import PeerFailed

from .frames import Link, LinkClosed, LinkError, send_all

WORD = 8


class Rows(Protocol):
    """A gather that has begun."""

    def wait(self) -> list[list[int]]:
        """Everybody's row, in rank order. A second wait returns the same."""
        ...


class Control(Protocol):
    """One rank's end of the control plane. All ranks gather alike, in the same order; `sequence` proves it.

    Raises PeerFailed naming the rank that is gone or out of step; after that the control plane is of no further use.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, row: Sequence[int], *, sequence: int) -> Rows:
        """Begin to collect everybody's `row` (W integers of 64 bits). Several may be under way."""
        ...

    def close(self) -> None:
        """This rank gathers no more; others that still do fail and name it. Closing twice is the same as once."""
        ...


class Gathering:
    """See Rows."""

    __slots__ = ("_finish", "_rows")

    def __init__(self, finish: Callable[[], list[list[int]]]) -> None:
        self._finish = finish
        self._rows: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        if self._rows is None:
            self._rows = self._finish()
        return self._rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A link downwards, and the ranks whose rows come up on it: `first` .. `first` + `count` - 1."""

    link: Link
    first: int
    count: int


class SocketControl:
    """A rank's place in the star: a leaf has a link up, a leader has one and branches, the hub has branches only.

    `branches` stand in rank order and, with this rank before them, cover a range without gaps. Used by one thread.
    """

    def __init__(self, *, rank: int, size: int, width: int, up: Link | None, branches: Sequence[Branch]) -> None:
        self.rank = rank
        self.size = size
        self.width = width
        self._up = up
        self._branches = tuple(branches)
        self._row = struct.Struct(f"<{1 + width}q")
        self._matrix = struct.Struct(f"<{size * (1 + width)}q")
        self._own: list[bytes] = []  # rows of gathers under way that wait for those below, oldest first
        self._num_gathered = 0
        self._num_done = 0
        self._done: dict[int, list[list[int]]] = {}
        self._failure: PeerFailed | None = None

    def gather(self, row: Sequence[int], *, sequence: int) -> Gathering:
        assert len(row) == self.width, (len(row), self.width)
        self._raise_if_failed()
        own = self._row.pack(sequence, *row)
        if self._up is not None and not self._branches:
            self._guard(self._up, lambda link: link.send(_header(None) + own))
        else:
            self._own.append(own)
        number = self._num_gathered
        self._num_gathered += 1
        return Gathering(partial(self._finish, number, sequence))

    def close(self) -> None:
        for branch in self._branches:
            branch.link.close()
        if self._up is not None:
            self._up.close()
        if self._failure is None:
            self._failure = PeerFailed(self.rank, "has closed its control plane", rank=self.rank)

    def _finish(self, number: int, sequence: int) -> list[list[int]]:
        while self._num_done <= number:
            self._raise_if_failed()
            self._done[self._num_done] = self._pass_on()
            self._num_done += 1
        rows = self._done.pop(number)
        self._check_sequence([row[0] for row in rows], sequence)
        return [row[1:] for row in rows]

    def _pass_on(self) -> list[list[int]]:
        """Complete the oldest gather that is under way: [R][sequence + W]."""
        if self._branches:
            block = b"".join([self._own.pop(0), *map(self._rows_from, self._branches)])
        elif self._up is None:
            block = self._own.pop(0)
        if self._up is None:
            down = _header(None) + block
        else:
            if self._branches:
                self._guard(self._up, lambda link: link.send(_header(None) + block))
            down = self._guard(self._up, Link.receive)
            self._check_header(down)
        self._send_down(down)
        words = self._matrix.unpack_from(down, WORD)
        step = 1 + self.width
        return [list(words[begin : begin + step]) for begin in range(0, len(words), step)]

    def _rows_from(self, branch: Branch) -> bytes:
        payload = self._guard(branch.link, Link.receive)
        self._check_header(payload)
        return payload[WORD:]

    def _send_down(self, payload: bytes) -> None:
        try:
            send_all((branch.link for branch in self._branches), payload)
        except LinkError as error:
            self._fail(error)

    def _guard[X](self, link: Link, use: Callable[[Link], X]) -> X:
        try:
            return use(link)
        except LinkError as error:
            self._fail(error)

    def _check_header(self, payload: bytes) -> None:
        culprit = int.from_bytes(payload[:WORD], "little") - 1
        if culprit >= 0:
            self._end(PeerFailed(culprit, "closed its control link", rank=self.rank))
