"""The control plane: one row of integers from every rank to every rank, over a star of its own, apart from the data.

    size <= group_size      hub 0 -+- 1          two levels      hub 0 -+- 1 .. 63
                                   +- 2                                 +- leader 64  --- 65 .. 127
                                   +- 3                                 +- leader 128 --- 129 .. 191

Rows travel up, the whole matrix travels down. No thread works behind anybody's back: a leaf's `gather` sends its row
at once, `wait` does the rest, and the hub and the leaders pass things on in their own `wait`. Knows integers and links;
does not know what a row means. How the links come about is `stars`.

Legend: R ranks, W integers in a row.

    up      | culprit | rows of this rank and the ranks below it, each sequence + W |     int64 each
    down    | culprit | rows of all ranks in rank order |

`culprit` is 0, or 1 + the rank that is lost: what one rank finds, the others are told before it ends.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

from ep.errors import PeerFailed

from .frames import Link, LinkError, send_all

WORD = 8
_ALL_WELL = bytes(WORD)


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
    """A link downwards; `num_rows` come up on it, for the rank at its other end and those behind that."""

    link: Link
    num_rows: int


class SocketControl:
    """A rank's place in the star: a leaf has a link up, a leader has one and branches, the hub has branches only.

    `branches` stand in rank order and, with this rank before them, cover a range of ranks. `up_rows`: rows in a frame
    to the rank above, zeros where there are fewer ranks. For one thread.
    """

    def __init__(
        self, *, rank: int, size: int, width: int, up: Link | None, branches: Sequence[Branch], up_rows: int = 1
    ) -> None:
        self.rank = rank
        self.size = size
        self.width = width
        self._up = up
        self._branches = tuple(branches)
        self._downward = [branch.link for branch in branches]
        self._row_bytes = WORD * (1 + width)
        self._up_bytes = WORD + up_rows * self._row_bytes
        self._row = struct.Struct(f"<{1 + width}q")
        self._matrix = struct.Struct(f"<{size * (1 + width)}q")
        self._under_way: deque[bytes] = deque()  # own rows, oldest first
        self._num_gathered = 0
        self._complete: dict[int, tuple[int, ...]] = {}  # by the number of the gather, until it is waited for
        self._num_complete = 0
        self._failure: PeerFailed | None = None

    def gather(self, row: Sequence[int], *, sequence: int) -> Gathering:
        assert len(row) == self.width, (len(row), self.width)
        self._raise_if_failed()
        own = self._row.pack(sequence, *row)
        if self._up is not None and not self._branches:
            try:
                self._up.send(self._up_frame(own))
            except LinkError as error:
                self._lose(error)
        self._under_way.append(own)
        number = self._num_gathered
        self._num_gathered += 1
        return Gathering(partial(self._finish, number, sequence))

    def close(self) -> None:
        self._failure = self._failure or PeerFailed(self.rank, "closed its control plane", rank=self.rank)
        for link in self._links():
            link.close()

    def _finish(self, number: int, sequence: int) -> list[list[int]]:
        while self._num_complete <= number:
            self._raise_if_failed()
            try:
                self._complete[self._num_complete] = self._complete_oldest()
            except LinkError as error:
                self._lose(error)
            self._num_complete += 1
        words, step = self._complete.pop(number), 1 + self.width
        self._check_sequence(words[::step], sequence)
        return [list(words[begin + 1 : begin + step]) for begin in range(0, len(words), step)]

    def _complete_oldest(self) -> tuple[int, ...]:
        """R x (sequence + W) integers of the oldest gather under way."""
        block = self._under_way.popleft()
        for branch in self._branches:
            block += self._receive(branch.link)[WORD : WORD + branch.num_rows * self._row_bytes]
        down = _ALL_WELL + block
        if self._up is not None:
            if self._branches:
                self._up.send(self._up_frame(block))
            down = self._receive(self._up)
        send_all(self._downward, down)
        return self._matrix.unpack_from(down, WORD)

    def _up_frame(self, block: bytes) -> bytes:
        return (_ALL_WELL + block).ljust(self._up_bytes, b"\0")

    def _receive(self, link: Link) -> bytes:
        payload = link.receive()
        if not payload.startswith(_ALL_WELL):
            culprit = int.from_bytes(payload[:WORD], "little") - 1
            self._end(culprit, f"is lost to the control plane, says rank {link.peer}")
        return payload

    def _lose(self, error: LinkError) -> NoReturn:
        assert error.peer is not None, "a link that stands knows its peer"
        self._end(error.peer, f"is lost to the control plane: {error}")

    def _end(self, culprit: int, cause: str) -> NoReturn:
        """Tell everybody on a link who is lost, as far as they still listen, and end."""
        self._failure = PeerFailed(culprit, cause, rank=self.rank)
        verdict = (culprit + 1).to_bytes(WORD, "little")
        for link in self._links():
            if link.peer != culprit:
                self._tell(link, verdict.ljust(link.outward.payload_bytes, b"\0"))
            link.close()
        raise self._failure

    def _tell(self, link: Link, payload: bytes) -> None:
        try:
            link.send(payload)
        except LinkError:
            return  # it is lost as well; one culprit, the first, is enough

    def _links(self) -> list[Link]:
        return self._downward + ([self._up] if self._up is not None else [])

    def _check_sequence(self, found: Sequence[int], sequence: int) -> None:
        """Every rank reads the same matrix, so every rank names the same culprit."""
        if len(set(found)) == 1:
            assert found[0] == sequence, (found, sequence)
            return
        common = max(found, key=lambda value: (found.count(value), -found.index(value)))
        culprit = max(rank for rank, value in enumerate(found) if value != common)
        cause = f"is out of step: it gathers for step {found[culprit]}, rank {found.index(common)} for step {common}"
        self._failure = PeerFailed(culprit, cause, rank=self.rank, step=sequence)
        raise self._failure

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure
