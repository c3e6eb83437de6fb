"""What ranks need from each other: rows to everybody, one row from everybody, and a loud end.

The protocol knows tensors, row counts and tags. It does not know tokens, experts or why something is sent.
All ranks of a group make the same calls in the same order; the tag proves it at every call. Several exchanges may
be in flight, they are matched by their order.

Legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

X = TypeVar("X")
Y = TypeVar("Y")


class Kind(IntEnum):
    """What an exchange is for. The numbers travel: add, never renumber."""

    VOTE = 0
    HEADER = 1
    DISPATCH = 2
    COMBINE = 3
    CHECK = 4
    MIGRATE = 5
    NODE_HEADER = 6
    NODE_DISPATCH = 7
    NODE_COMBINE = 8


class Tag(NamedTuple):
    """The place in the program at which an exchange is made. Equal on all ranks, or the exchange fails on all."""

    step: int
    layer: int
    track: int
    round: int
    kind: Kind

    def __str__(self) -> str:
        kind = self.kind.name if isinstance(self.kind, Kind) else f"kind {self.kind}"
        return f"{kind}(step {self.step}, layer {self.layer}, track {self.track}, round {self.round})"


class Pending(Generic[X]):
    """Something started whose value is there after wait(). A second wait returns the same value at once."""

    __slots__ = ("_finish", "_value")

    def __init__(self, finish: Callable[[], X]) -> None:
        self._finish: Callable[[], X] | None = finish
        self._value: X | None = None

    @classmethod
    def ready(cls, value: X) -> Pending[X]:
        """A Pending that has nothing to wait for."""
        return cls(lambda: value)

    def wait(self) -> X:
        """The value. What failed raises, and raises again when it is waited for again."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value  # type: ignore[return-value]  # set by now; X may itself be None

    def then(self, change: Callable[[X], Y]) -> Pending[Y]:
        """A Pending of change(value). `change` runs once, in the thread that waits, when it waits."""
        return Pending(lambda: change(self.wait()))


class Transport(Protocol):
    """One rank's end of a group. Every implementation passes `conformance.check_transport`.

    Buffers given to a call belong to it until wait() returns. Errors are TransportErrors and name the culprit; after
    one, every later call on any rank of the group fails too.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """Rows of `send` in destination order arrive in `recv` in source order; the value is `recv`.

        The splits hold R counts of rows (dimension 0) and add up to the tensors' lengths. Zero rows are ordinary. Both
        tensors are contiguous and of one dtype.
        """
        ...

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        """The value is a new [R, *row.shape]: everybody's row, in rank order."""
        ...

    def abort(self, cause: BaseException) -> None:
        """Every other rank's next wait raises PeerFailed naming this rank."""
        ...

    def close(self) -> None:
        """This rank makes no more calls. Others that need one fail at once. Closing twice is the same as once."""
        ...


def assert_fit(
    recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], size: int
) -> None:
    """What `Transport.all_to_all` asks of its caller, in a group of so many; memory that is contiguous is not in it."""
    assert len(send_splits) == len(recv_splits) == size, (send_splits, recv_splits, size)
    assert sum(send_splits) == send.shape[0], (send_splits, send.shape)
    assert sum(recv_splits) == recv.shape[0], (recv_splits, recv.shape)
    assert send.dtype is recv.dtype, (send.dtype, recv.dtype)
    assert send.shape[1:] == recv.shape[1:], (send.shape, recv.shape)
