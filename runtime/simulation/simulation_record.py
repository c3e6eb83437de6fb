"""What a simulated group did, and what that means for those who wait: steps, requests, tokens, and their percentiles.

All times are microseconds of the virtual clock. Values only; nothing here runs anything.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..failure.verdict import Verdict
from ..scheduling.cadence import CadenceTally, Reason


class StepRecord(NamedTuple):
    """One step of the group; the lists have an entry a rank.

    begin_us, end_us    its time on the devices: as long as the slowest rank takes
    busy_us_R           what each rank takes for its own work; the rest it waits for the slowest
    prompt_us_R         the part of that which its prompts take
    """

    number: int
    begin_us: float
    end_us: float
    reason: Reason
    decode_R: tuple[int, ...]
    prefill_R: tuple[int, ...]
    busy_us_R: tuple[float, ...]
    prompt_us_R: tuple[float, ...]

    @property
    def tokens_R(self) -> list[int]:
        """Tokens that each rank computes."""
        return [decode + prefill for decode, prefill in zip(self.decode_R, self.prefill_R, strict=True)]

    @property
    def length_us(self) -> float:
        """From its begin to its end."""
        return self.end_us - self.begin_us


@dataclass(slots=True, kw_only=True)
class Story:
    """One request: when it came and where it went, its first and its last token. None: not yet, or never."""

    arrival_us: float
    prompt_len: int
    rank: int | None = None
    first_us: float | None = None
    last_us: float | None = None
    num_tokens: int = 0
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Every token but the first of its request: when it was there, and how long after the one before it."""

    at_us: array[float] = field(default_factory=lambda: array("d"))
    gap_us: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a simulated group did.

    waves             how often all ranks were idle
    longest_put_off   steps in a row in which some rank's prompts were put off, at most
    verdict           why it ended before its time, if something ended it; then stories are open
    cut_steps         that ran in several tracks
    uncut_steps       how many did not, by reason
    """

    ranks: int
    seed: int
    steps: Sequence[StepRecord]
    stories: Sequence[Story]
    tokens: Tokens
    waves: int
    longest_put_off: int
    end_us: float
    verdict: Verdict | None
    cut_steps: int = 0
    uncut_steps: str = ""

    def digest(self) -> str:
        """Short, and equal for runs that did the same at the same times."""
        text = repr((self.steps, self.stories, self.tokens.at_us.tobytes(), self.end_us, str(self.verdict)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Times in [begin_us, end_us): what happens outside is not looked at."""

    begin_us: float = 0.0
    end_us: float = math.inf

    def __contains__(self, at_us: float) -> bool:
        return self.begin_us <= at_us < self.end_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What people and the cadence feel; None where nothing of the kind happened.

    output_throughput   tokens a second, all ranks together
    itl, ttft           milliseconds between two tokens of a request; from its arrival to its first
    balance_ratio       mean over max of the tokens that ranks compute in a step (see `cadence`)
    deferred_steps      steps in which some rank's prompts were put off
    """

    output_throughput: float
    p50_itl_ms: float | None
    p99_itl_ms: float | None
    mean_ttft_ms: float | None
    p99_ttft_ms: float | None
    balance_ratio: float
    deferred_steps: int


def measure(run: Run, *, waits: Window, work: Window) -> Measures:
    """Throughput in `work`, at most to the run's end; all else in `waits`. A token counts when it is there, a step when
    it begins."""
    ttfts = sorted(
        [story.first_us - story.arrival_us for story in run.stories if story.first_us and story.first_us in waits]
    )
    gaps = sorted([gap for at, gap in zip(run.tokens.at_us, run.tokens.gap_us, strict=True) if at in waits])
    tally = CadenceTally()
    for step in run.steps:
        if step.begin_us in waits:
            tally = tally.add(step.reason, step.tokens_R)
    return Measures(
        output_throughput=_throughput(run, work),
        p50_itl_ms=percentile_ms(gaps, 0.50),
        p99_itl_ms=percentile_ms(gaps, 0.99),
        mean_ttft_ms=sum(ttfts) / len(ttfts) / 1000 if ttfts else None,
        p99_ttft_ms=percentile_ms(ttfts, 0.99),
        balance_ratio=tally.balance_ratio,
        deferred_steps=tally.deferred_steps,
    )


def _throughput(run: Run, work: Window) -> float:
    """Tokens a second."""
    length_us = min(work.end_us, run.end_us) - work.begin_us
    first = [story.first_us for story in run.stories if story.first_us is not None]
    tokens = sum([at in work for at in (*first, *run.tokens.at_us)])
    return tokens / length_us * 1e6 if length_us > 0 else 0.0


def percentile_ms(ascending_us: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None of none."""
    if not ascending_us:
        return None
    return ascending_us[math.ceil(share * len(ascending_us)) - 1] / 1000
