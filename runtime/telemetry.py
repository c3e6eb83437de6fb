"""What a rank counts while it steps; numbers only, read by the command line and by tests, never by a decision.

Knows rows and updates; does not know clocks, ranks other than its own, or where the numbers are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rows import Row, Update


@dataclass(slots=True, kw_only=True)
class StepCounters:
    """Sums over the life of one rank.

    steps              steps in which the group ran the layers
    idle_steps         those in which this rank had no token
    computed_tokens    tokens put through the layers here, prompts, drafts and thrown-away rows included
    generated_tokens   tokens that reached a request
    finished           requests that ended here
    """

    steps: int = 0
    idle_steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0

    def launched(self, rows: Sequence[Row]) -> None:
        """One step was put on the device with these rows."""
        self.steps += 1
        self.idle_steps += not rows
        self.computed_tokens += sum(row.num_tokens for row in rows)

    def updated(self, update: Update) -> None:
        """One request got tokens, or ended."""
        self.generated_tokens += len(update.new_tokens)
        self.finished += update.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """One rank at one moment: its counters, its cache and its queue."""

    rank: int
    steps: int
    idle_steps: int
    computed_tokens: int
    generated_tokens: int
    finished: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_pages: int
    free_pages: int
    running: int
    waiting: int
    slow_steps: int
    """Steps in which this rank took much longer than others would for its work (see `straggler`)."""
    degraded: bool
    """It was named a straggler and drained: it gets no new requests."""
    expert_balance: float
    """Mean over max of the tokens routed to each expert rank, all layers together; 1.0 = level, or nothing counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """All ranks at one moment."""

    ranks: tuple[RankStats, ...]

    @property
    def generated_tokens(self) -> int:
        """Over all ranks."""
        return sum(rank.generated_tokens for rank in self.ranks)
