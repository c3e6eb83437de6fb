"""The ranks of an engine as the engine sees them, wherever they run.

The engine hands items to single ranks and sets all of them off on a wave; what a rank says comes back as News and
Notes. Knows values only: not threads, not processes, not how a step works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from ..requests.admission import Capacity
from ..requests.outputs import News, Note
from ..requests.request import Request
from ..requests.telemetry import RankStats

if TYPE_CHECKING:  # they need torch, and the front door has none
    from ..model.model_config import ModelConfig
    from ..weights.memory import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """A request that enters a rank."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request that is no longer wanted; unknown ids are ignored, so aborting twice is harmless."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What every rank is to vote from now on: pause launches nothing, drain takes nothing new. The last one counts."""

    pause: bool = False
    drain: bool = False


Item = Admit | Abort | Wish
"""What a rank finds in its inbox."""


class Inbox(Protocol):
    """Where items wait for a rank."""

    def take(self) -> Sequence[Item]:
        """All that is there, oldest first; never waits."""
        ...


class Tray:
    """An inbox of this process: any thread may put, the rank takes."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()

    def put(self, item: Item) -> None:
        self._items.append(item)

    def take(self) -> list[Item]:
        """For the protocol see `Inbox`."""
        return [self._items.popleft() for _ in range(len(self._items))]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What does not change while the ranks live.

    plan         where the bytes of one rank go
    capacities   the longest request of each rank
    notes        what the user should know of the model's files, a line each
    """

    model: ModelConfig
    plan: MemoryPlan
    capacities: tuple[Capacity, ...]
    notes: tuple[str, ...]


class Wave:
    """What ranks say in one wave, until all have left it.

    An interrupted wait (Ctrl-C) does not end it, as it would end a generator: asking again goes on where it was.

    hear   waits for the next word: a rank and its News or Notes, or None in their place when it has left
    end    called once, when all have left; may raise
    """

    def __init__(
        self, size: int, *, hear: Callable[[], tuple[int, Sequence[News | Note] | None]], end: Callable[[], object]
    ) -> None:
        self._running = size
        self._hear = hear
        self._end = end
        self._heard: deque[tuple[int, News | Note]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, News | Note]:
        while not self._heard:
            if not self._running:
                raise StopIteration
            rank, items = self._hear()
            if items is not None:
                self._heard.extend((rank, news) for news in items)
                continue
            self._running -= 1
            if not self._running:
                self._end()
        return self._heard.popleft()


class Ranks(Protocol):
    """A running group of ranks."""

    @property
    def facts(self) -> GroupFacts: ...

    def send(self, rank: int, item: Item) -> None:
        """Leave an item for a rank, which looks at it before its next step. From any thread."""
        ...

    def wave(self) -> Iterator[tuple[int, News | Note]]:
        """Run all ranks until they are idle or paused: who says what. Raises the first cause of a failure."""
        ...

    def stats(self) -> tuple[RankStats, ...]:
        """Every rank's counters; exact between waves."""
        ...

    def close(self, cause: BaseException) -> None:
        """End all ranks; `cause` is what they are told if they run."""
        ...
