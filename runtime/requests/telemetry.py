"""What a rank counts while it steps; numbers only, read by the command line and by tests, never by a decision.

Knows rows; does not know clocks, ranks other than its own, or where the numbers are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eplb.stats import RebalanceStats

from .measures import RankMeasures
from .rows import Rows


@dataclass(slots=True, kw_only=True)
class StepCounters:
    """Sums over the life of one rank.

    steps              steps in which the group ran the layers
    idle_steps         those in which this rank had no token
    computed_tokens    tokens put through the layers here, prompts, drafts and thrown-away rows included
    rerun_steps        steps that were launched again because one in flight had overflowed somewhere; not in `steps`
    mean_pairs         (token, expert) pairs that an average rank computed in a step, summed over steps
    most_pairs         those of the rank with the most, summed likewise: the others waited for it
    voted_steps        steps that these two sums are over
    beat_wait_ns       nanoseconds in waits for the votes of other ranks
    """

    steps: int = 0
    idle_steps: int = 0
    computed_tokens: int = 0
    rerun_steps: int = 0
    voted_steps: int = 0
    mean_pairs: float = 0.0
    most_pairs: int = 0
    beat_wait_ns: int = 0

    def launched(self, rows: Rows) -> None:
        """One step was put on the device with these rows."""
        self.steps += 1
        self.idle_steps += not rows
        self.computed_tokens += rows.num_tokens

    def voted(self, expert_pairs: Sequence[int]) -> None:
        """What every rank's experts computed in the last step."""
        if self.voted_steps < self.steps:  # a vote after no launch repeats the last one's
            self.voted_steps = self.steps
            self.mean_pairs += sum(expert_pairs) / len(expert_pairs)
            self.most_pairs += max(expert_pairs)


@dataclass(slots=True, kw_only=True)
class KvStats:
    """Latents that came from elsewhere and went there, since the start.

    loads           requests whose latents came, and were the right ones
    loaded_tokens   tokens that needed no computing for it
    loaded_bytes    bytes of their pages
    load_s          seconds from pages given to verified, all loads together
    failures        loads that failed, were late, or brought something else
    lent            prompts kept for other engines to fetch
    """

    loads: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    failures: int = 0
    lent: int = 0


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
    overflow_steps: int
    """Launches in which rows of this rank did not fit the exchange."""
    rerun_steps: int
    """Steps that the group ran again, exact, because rows of some rank had not fit."""
    network_bytes: int = 0
    node_bytes: int = 0
    """What this rank's exchange sent to other nodes, and to other ranks of its own; padding and headers too."""
    mean_pairs: float = 0.0
    most_pairs: int = 0
    """Measured: (token, expert) pairs of the average rank and of the busiest, step by step; alike on all ranks."""
    experts: RebalanceStats = field(default_factory=RebalanceStats)
    """What moved, where experts do."""
    cut_steps: int
    """Steps that ran in several tracks; the same on all ranks."""
    uncut_steps: str
    """How many did not, by reason; empty where overlap is off."""
    replayed_steps: int = 0
    """Steps that were replayed as graphs here; 0 where nothing is captured."""
    launched_steps: str = ""
    """How many were launched kernel by kernel all the same, by reason."""
    beat_wait_s: float = 0.0
    """Seconds in waits for the votes of other ranks."""
    deferred_steps: int = 0
    """Steps in which some rank's prompts were put off; the same on all ranks."""
    token_balance: float = 1.0
    """Mean over max of the tokens that ranks compute in a step; the rest would be padding. The same on all ranks."""
    measures: RankMeasures | None = None
    """Where its steps' time went, where a benchmark asked."""
    lent_pages: int = 0
    """Pages that are held for other engines, or for latents on their way."""
    kv: KvStats = field(default_factory=KvStats)
    """What came from elsewhere, and went there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """All ranks at one moment."""

    ranks: tuple[RankStats, ...]

    @property
    def generated_tokens(self) -> int:
        """Over all ranks."""
        return sum(rank.generated_tokens for rank in self.ranks)
