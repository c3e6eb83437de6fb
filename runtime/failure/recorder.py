"""Where a rank says what it is about, so that someone else can tell when it cannot.

A `Board` is read by the rank's pulse; `Unwatched` only adds up how long the rank waited, for ranks that are threads.
The transport is wrapped, so that every exchange is stamped in one place. Knows phases; does not know who reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ep import Kind, Pending, Tag, Transport
from ep.wrapping import Wrapping

from .board import Board
from .verdict import Phase


class Recorder(Protocol):
    """What a rank's loop tells while it steps. `waited_ns`: time spent in waits for other ranks, in all."""

    @property
    def waited_ns(self) -> int: ...

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:
        """This rank enters a phase."""
        ...

    def wait(self) -> None:
        """This rank has done its part of the phase, and now waits for others until it goes on or stamps again."""
        ...

    def go_on(self) -> None:
        """The wait is over; the phase goes on."""
        ...

    def predict(self, seconds: float) -> None:
        """The step that begins should take so long."""
        ...


class Unwatched:
    """Nobody reads it; it only measures."""

    def __init__(self) -> None:
        self.waited_ns = 0
        self._since_ns = 0

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:  # noqa: ARG002  # the protocol's
        self.go_on()

    def wait(self) -> None:
        self._since_ns = time.monotonic_ns()

    def go_on(self) -> None:
        if self._since_ns:
            self.waited_ns += time.monotonic_ns() - self._since_ns
            self._since_ns = 0

    def predict(self, seconds: float) -> None:
        """Nobody waits for it."""


class Watched(Unwatched):
    """Stamps on a board as well.

    A step that is run again is stamped as part of the step in which that happens: places on the board only grow, and
    whoever is behind is found by that.
    """

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board
        self._newest = -1

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:
        super().stamp(phase, step, layer)
        self._newest = max(self._newest, step)
        self._board.stamp(phase, self._newest, max(layer, 0))

    def wait(self) -> None:
        super().wait()
        self._board.wait()

    def predict(self, seconds: float) -> None:
        self._board.predicted_s = seconds


_PHASES = {Kind.COMBINE: Phase.COMBINE, Kind.MIGRATE: Phase.MIGRATE}


class StampedTransport(Wrapping):
    """A transport whose exchanges are stamped when they begin and when their wait begins and ends."""

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        super().__init__(transport)
        self._recorder = recorder

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        """See `ep.Transport`."""
        if tag.kind is not Kind.DISPATCH:  # its header has stamped it
            self._recorder.stamp(_PHASES.get(tag.kind, Phase.DISPATCH), tag.step, tag.layer)
        pending = self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)
        return Pending(lambda: self._wait_for(pending))

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        """See `ep.Transport`."""
        if tag.kind is not Kind.MIGRATE:
            return self._transport.all_gather(row, tag=tag)
        self._recorder.stamp(Phase.MIGRATE, tag.step, tag.layer)
        pending = self._transport.all_gather(row, tag=tag)
        return Pending(lambda: self._wait_for(pending))

    def _wait_for(self, pending: Pending[Tensor]) -> Tensor:
        self._recorder.wait()
        value = pending.wait()
        self._recorder.go_on()
        return value
