"""Ranks that are processes, as the front in rank 0's process sees them.

    main thread      the engine: hands out letters, takes what is said
    rank 0's thread  `rank_loop`, like every other rank's process
    reader thread    puts what the links say into the same queue

Knows links and letters; how the processes came about is the launcher's business, who failed is the pulse's.
"""

from __future__ import annotations

import queue
import selectors
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ep import PeerFailed, SerriedError

from ..control.frames import Link
from ..loop.ranks import GroupFacts, Item, Wave
from ..requests.admission import Capacity
from ..requests.outputs import News, Note
from ..requests.telemetry import RankStats
from .letters import (
    EndLetter,
    LetterReader,
    NewsLetter,
    NoteLetter,
    ReadyLetter,
    ToFront,
    ToRank,
    WaveEndLetter,
    WaveLetter,
    letter_of,
    send_letter,
)
from .mailbox import LocalMailbox

END_S = 10.0
"""How long rank 0's own thread may take to end."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """The group has failed, or a link of it."""

    cause: BaseException


class ProcessRanks:
    """The front's side of a group of processes; see `ranks.Ranks`.

    links      to every rank but 0
    run_own    builds rank 0, tells the facts of the model, and runs it on its mailbox to its end; in a thread
    on_start   is given whom to tell when the group has failed
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        *,
        run_own: Callable[[LocalMailbox, Callable[[GroupFacts], None]], None],
        on_start: Callable[[Callable[[BaseException], None]], None],
    ) -> None:
        self._links = dict(links)
        self._said: queue.SimpleQueue[tuple[int, ToFront] | _Lost] = queue.SimpleQueue()
        self._own = LocalMailbox(lambda letter: self._said.put((0, letter)))
        self._built: queue.SimpleQueue[GroupFacts | _Lost] = queue.SimpleQueue()
        self._run_own = run_own
        self._lost = False
        on_start(self.lose)
        self._thread = threading.Thread(target=self._run, name="rank 0", daemon=True)
        self._thread.start()
        self._reader = threading.Thread(target=self._read, name="front reader", daemon=True)
        self._reader.start()
        built = self._built.get()
        if isinstance(built, _Lost):
            raise built.cause
        ready = self._wait_until_ready()
        self.facts = GroupFacts(
            model=built.model,
            plan=built.plan,
            capacities=tuple(
                Capacity(max_model_len=r.max_model_len, num_pages=r.num_pages, page_size=r.page_size) for r in ready
            ),
            notes=built.notes,
        )
        self._stats: dict[int, RankStats] = {}

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return 1 + len(self._links)

    def lose(self, cause: BaseException) -> None:
        """Tell the engine that the group has failed; from any thread."""
        self._lost = True
        self._said.put(_Lost(cause))
        self._built.put(_Lost(cause))

    def send(self, rank: int, item: Item) -> None:
        """For the protocol see `ranks.Ranks`."""
        self._post(rank, letter_of(item))

    def wave(self) -> Wave:
        """For the protocol see `ranks.Ranks`."""
        for rank in range(self.size):
            self._post(rank, WaveLetter())
        return Wave(self.size, hear=self._hear_wave, end=lambda: None)

    def _hear_wave(self) -> tuple[int, Sequence[News | Note] | None]:
        rank, letter = self._hear()
        if isinstance(letter, NewsLetter):
            return rank, letter.items
        if isinstance(letter, NoteLetter):
            return rank, [letter.note]
        if isinstance(letter, WaveEndLetter):
            self._stats[rank] = letter.stats
            return rank, None
        raise SerriedError(f"rank {rank} says {type(letter).__name__} in a wave", rank=0)

    def stats(self) -> tuple[RankStats, ...]:
        """For the protocol see `ranks.Ranks`; as of the end of the last wave."""
        return tuple(self._stats[rank] for rank in sorted(self._stats))

    def close(self, cause: BaseException) -> None:  # noqa: ARG002  # between waves nobody needs to be told why
        """End all ranks in order; no wave is running. A group that has failed ends by itself."""
        if self._lost:
            return
        for rank in range(self.size):
            self._post(rank, EndLetter())
        self._thread.join(END_S)
        for link in self._links.values():
            link.close()

    def _post(self, rank: int, letter: ToRank) -> None:
        if rank == 0:
            self._own.put(letter)
        else:
            send_letter(self._links[rank], letter)

    def _hear(self) -> tuple[int, ToFront]:
        item = self._said.get()
        if isinstance(item, _Lost):
            raise item.cause
        return item

    def _wait_until_ready(self) -> list[ReadyLetter]:
        ready: dict[int, ReadyLetter] = {}
        while len(ready) < self.size:
            rank, letter = self._hear()
            if not isinstance(letter, ReadyLetter):
                raise SerriedError(f"rank {rank} says {type(letter).__name__} before it is ready", rank=0)
            ready[rank] = letter
        return [ready[rank] for rank in sorted(ready)]

    def _run(self) -> None:
        try:
            self._run_own(self._own, self._built.put)
        except BaseException as cause:  # the engine raises it in the caller's thread
            self.lose(cause)

    def _read(self) -> None:
        readers = {rank: LetterReader.at_front() for rank in self._links}
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while selector.get_map():
                for item, _ in selector.select():
                    rank = item.data
                    try:
                        for frame in self._links[rank].receive_ready():
                            letter = readers[rank].take(frame)
                            if letter is not None:
                                self._said.put((rank, letter))  # type: ignore[arg-type]  # a front's reader
                    except (SerriedError, OSError, ValueError) as error:
                        selector.unregister(item.fileobj)
                        if self._thread.is_alive():
                            self._said.put(_Lost(PeerFailed(rank, f"its link to the front ended: {error}", rank=0)))
