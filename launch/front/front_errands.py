"""What the front door asks all ranks besides requests: to empty their caches, to trace steps. Waits for their answers.

Knows commands and answers; does not know requests.
"""

from __future__ import annotations

import asyncio

from runtime.ranks.wire import FlushedLetter, FlushLetter, ProfileLetter, StopProfileLetter, TraceLetter

from .front_link import RankLink

ANSWER_S = 30.0
"""Ranks answer between two steps."""


class Errands:
    """One front door's."""

    def __init__(self, link: RankLink, size: int) -> None:
        self._link = link
        self._size = size
        self._flushed: set[int] = set()
        self._traces: dict[int, TraceLetter] | None = None
        self._news = asyncio.Event()

    def hear(self, rank: int, letter: FlushedLetter | TraceLetter) -> None:
        """An answer."""
        if isinstance(letter, FlushedLetter):
            self._flushed.add(rank)
        elif self._traces is not None and rank not in self._traces:
            self._traces[rank] = letter
        self._news.set()

    async def flush(self) -> bool:
        """Whether all ranks have emptied their prefix caches in time."""
        self._flushed.clear()
        for rank in range(self._size):
            self._link.send(rank, FlushLetter())
        return await self._wait(self._flushed)

    def start_trace(self, steps: int, path: str) -> None:
        """Trace the next steps on every rank. Raises ValueError while a trace is being taken."""
        if self._traces is not None and len(self._traces) < self._size:
            raise ValueError("a trace is being taken; stop it first")
        letter = ProfileLetter(steps, path)
        self._traces = {}
        for rank in range(self._size):
            self._link.send(rank, letter)

    async def stop_trace(self) -> str:
        """End the trace, if it has not ended; what each rank says of it, a line each. Raises ValueError without one."""
        traces = self._traces
        if traces is None:
            raise ValueError("no trace was started")
        for rank in set(range(self._size)) - traces.keys():
            self._link.send(rank, StopProfileLetter())
        await self._wait(traces)
        self._traces = None
        return "\n".join([f"rank {rank}: {letter.line} ({letter.path})" for rank, letter in sorted(traces.items())])

    async def _wait(self, answers: set[int] | dict[int, TraceLetter]) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_S
        while len(answers) < self._size:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), until - loop.time())
            except TimeoutError:
                return False
        return True
