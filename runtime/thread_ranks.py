"""Ranks that are threads of this process and take turns: the group for tests, for one rank, and for a first look.

Between waves no thread runs. Knows the thread transport and the workers; does not know requests.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dbo import UNTIMED, Untimed
from ep import ThreadGroup, Transport

from .assembly import OnPlan, Parts, Seat, assemble
from .control.thread_control import ThreadControl
from .failure.recorder import Unwatched
from .loop.instruments import Instruments
from .loop.ranks import GroupFacts, Item, Tray, Wave
from .loop.showing import NOT_SHOWN, NotShown
from .loop.worker import Worker
from .requests.outputs import News, Note
from .requests.telemetry import RankStats
from .scheduling.scheduler import Drafter
from .settings.config import EngineConfig
from .settings.settling import settle
from .weights.progress import OnProgress

Said = queue.SimpleQueue[tuple[int, Sequence[News | Note] | None]]


class ThreadRanks:
    """`config.ranks` workers on one ThreadGroup; see `ranks.Ranks`.

    trace, timeline   what is put around each rank's transport, and what each rank's tracks are told to
    instruments       what a benchmark wants measured
    show              where each rank shows how it is
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        drafter: Drafter | None,
        on_plan: OnPlan | None,
        on_progress: OnProgress | None,
        trace: Callable[[Transport], Transport] = lambda transport: transport,
        timeline: Callable[[int], Untimed] = lambda _: UNTIMED,
        instruments: Instruments | None = None,
        show: Callable[[int], NotShown] = lambda _: NOT_SHOWN,
    ) -> None:
        settled = settle(config)
        self._said: Said = queue.SimpleQueue()
        said = self._said  # the workers know the queue, not this object: no cycle keeps their memory alive
        self._trays = tuple(Tray() for _ in range(config.ranks))
        self._group: ThreadGroup[None] = ThreadGroup(config.ranks)
        self._parts: Parts = _in_passing_thread(
            partial(
                assemble,
                settled,
                seats=[
                    _seat(
                        transport, tray, said, trace=trace, timeline=timeline(transport.rank), show=show(transport.rank)
                    )
                    for transport, tray in zip(self._group.transports, self._trays, strict=True)
                ],
                drafter=drafter,
                on_plan=on_plan,
                on_progress=on_progress,
                instruments=instruments,
            )
        )
        self._group.start(lambda transport: self.workers[transport.rank].launcher.runner.prepare())
        self._group.join()
        self.facts = GroupFacts(
            model=self._parts.model,
            plan=self._parts.plan,
            capacities=tuple(worker.scheduler.capacity for worker in self._parts.workers),
            notes=self._parts.notes,
        )

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The ranks; to be looked at between waves only."""
        return self._parts.workers

    def send(self, rank: int, item: Item) -> None:
        """For the protocol see `ranks.Ranks`."""
        self._trays[rank].put(item)

    def wave(self) -> Wave:
        """For the protocol see `ranks.Ranks`."""
        self._group.start(self._run_rank)
        return Wave(len(self.workers), hear=self._said.get, end=self._group.join)

    def stats(self) -> tuple[RankStats, ...]:
        """For the protocol see `ranks.Ranks`."""
        return tuple(worker.stats() for worker in self.workers)

    def close(self, cause: BaseException) -> None:
        """For the protocol see `ranks.Ranks`."""
        self._group.stop(cause)
        if self._group.wait_for_end():
            for worker in self.workers:
                worker.close()

    def _run_rank(self, transport: Transport) -> None:
        try:
            self.workers[transport.rank].run_wave()
        finally:
            self._said.put((transport.rank, None))


def _in_passing_thread(build: Callable[[], Parts]) -> Parts:
    """`build()` in a thread that ends with it.

    Torch's OpenMP keeps a team of threads for every thread that ever computed, and once teams together are larger than
    the machine it no longer lets them wait awake: each matmul of a rank, which has a team of its own, then begins with
    two system calls. The team of whoever loads weights must not outlive the loading.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="assembly") as builder:
        return builder.submit(build).result()


def _seat(
    transport: Transport,
    tray: Tray,
    said: Said,
    *,
    trace: Callable[[Transport], Transport],
    timeline: Untimed,
    show: NotShown,
) -> Seat:
    def emit(items: Sequence[News]) -> None:
        said.put((transport.rank, items))

    def notify(note: Note) -> None:
        show.noted(note.text)
        said.put((transport.rank, [note]))

    return Seat(
        transport=trace(transport),
        control=ThreadControl(transport),
        recorder=Unwatched(),
        emit=emit,
        notify=notify,
        inbox=tray,
        timeline=timeline,
        show=show,
    )
