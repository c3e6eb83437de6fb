"""Whose turn it is among threads of which one runs at a time. Knows states and turns, not what is waited for.

Each rank sleeps on a lock of its own, so passing the baton wakes one thread. All methods but sleep() are called under
one mutex of the owner's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum, auto


class State(Enum):
    """What a rank is doing."""

    READY = auto()  # has never run
    RUNNING = auto()  # has the baton
    WAITING = auto()
    ENDED = auto()
    LOST = auto()  # does not react and is not waited for


class Baton:
    """The turns of `size` ranks. Nobody has the baton until the first hand_to()."""

    def __init__(self, size: int) -> None:
        self.states = [State.READY] * size
        self.last_pass = time.monotonic()
        self._turns = [threading.Lock() for _ in range(size)]  # held, except between a grant and its acceptance
        for turn in self._turns:
            turn.acquire()

    def sleep(self, rank: int) -> None:
        """Until it is this rank's turn. Not under the mutex."""
        self._turns[rank].acquire()

    def hand_to(self, rank: int) -> None:
        """Let a sleeping rank run."""
        self.last_pass = time.monotonic()
        self.states[rank] = State.RUNNING
        self._turns[rank].release()

    def pass_on(self, rank: int, can_go_on: Callable[[int], bool]) -> bool:
        """Hand the baton of `rank` to the next one, rank + 1 first, that has yet to run or waits and can go on.

        False if there is none.
        """
        size = len(self.states)
        for distance in range(1, size):
            other = (rank + distance) % size
            state = self.states[other]
            if state is State.READY or (state is State.WAITING and can_go_on(other)):
                self.hand_to(other)
                return True
        return False

    def wake_all(self) -> None:
        """Let everybody run at once, to their end: the one with the baton may never pass it on."""
        for rank, state in enumerate(self.states):
            if state in (State.READY, State.WAITING):
                self.hand_to(rank)

    @property
    def holder(self) -> int | None:
        """The rank that runs (the first, after wake_all), None when all have ended."""
        return self.states.index(State.RUNNING) if State.RUNNING in self.states else None

    @property
    def all_ended(self) -> bool:
        return all(state in (State.ENDED, State.LOST) for state in self.states)
