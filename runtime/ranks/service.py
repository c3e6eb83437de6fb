"""What a rank does for a service between two steps: says how it is, empties its cache, traces steps.

Asked once a step, by the clock of the rank's own thread; never waits. Knows its worker, its cache's log and its
timeline; does not know where letters go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..forward.tracing import summary, trace_path, write_trace
from ..loop.profiling import SwitchedTimeline
from ..loop.worker import Worker
from ..requests.kv_log import KvLog
from .wire import Command, FlushedLetter, FlushLetter, ProfileLetter, ReportLetter, TraceLetter, WireToFront

REPORT_S = 0.25
IDLE_MS = 100
"""Between looks for pages that others have fetched."""


class Service:
    """One rank's. `say` takes what is to be told; `log` is the log of the worker's prefix cache."""

    def __init__(
        self, worker: Worker, *, log: KvLog, timeline: SwitchedTimeline, say: Callable[[WireToFront], None]
    ) -> None:
        self._worker = worker
        self._log = log
        self._timeline = timeline
        self._say = say
        self._report_at = 0.0
        self._trace_to: Path | None = None

    def turn(self) -> None:
        """Between two steps."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self.report()
        if self._trace_to is not None and not self._timeline.is_on:
            self._write_trace()

    def report(self) -> None:
        """Say how this rank is, and what its cache has come to hold."""
        self._say(ReportLetter(self._worker.stats()))
        self.tell_cache()

    def tell_cache(self) -> None:
        """Say what changed in the prefix cache."""
        letter = self._log.take()
        if letter is not None:
            self._say(letter)

    def idle_ms(self) -> int | None:
        """Between waves: give back pages that were fetched by others; milliseconds until there may be more, if ever."""
        hand_over = self._worker.scheduler.hand_over
        if not hand_over.awaits:
            return None
        outcomes = hand_over.turn()
        assert not outcomes, f"latents came between waves for {[one.request.id for one in outcomes]}"
        if not hand_over.awaits:
            self.report()
            return None
        return IDLE_MS

    def unfinished_ids(self) -> tuple[str, ...]:
        """Of the requests that this rank still holds."""
        return self._worker.scheduler.unfinished_ids

    def obey(self, command: Command) -> None:
        """Carry out what the front door asks besides requests."""
        if isinstance(command, FlushLetter):
            self._worker.prefix.flush()
            self.tell_cache()
            self._say(FlushedLetter())
        elif isinstance(command, ProfileLetter):
            self._trace_to = trace_path(Path(command.path), self._worker.transport.rank)
            self._timeline.start(command.steps)
        elif self._trace_to is None:
            self._say(TraceLetter("", "nothing was traced", failed=True))
        else:
            self._write_trace()

    def _write_trace(self) -> None:
        assert self._trace_to is not None, "there is a trace to write"
        path, self._trace_to = self._trace_to, None
        spans = self._timeline.stop()
        try:
            write_trace(path, spans, rank=self._worker.transport.rank)
        except OSError as error:
            self._say(TraceLetter(str(path), f"{path}: {error.strerror or error}", failed=True))
        else:
            self._say(TraceLetter(str(path), summary(spans)))
