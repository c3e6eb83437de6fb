"""Which rank keeps the others waiting: found from what all ranks vote, by the same rule on every rank.

Every step lasts as long as its slowest rank, so one slow machine slows all. But who takes long may just have more to
do. No cost model is asked for that: whatever a token, a cached token or an expert's row costs, a rank with at most f
times another's work in each of them takes at most f times as long,

    time(work) = fixed + a x decode_tokens + b x context_tokens + c x expert_pairs       all unknown, none negative
    allowed(r by p) = time(p) x max(1, work(r) / work(p) in each of the three)           none if p has nothing of one

A rank's *slowness* in a step is its time over the median that the others allow it; load alone never lifts it above 1.
Its prompts' cost depends on how they were cut, which votes do not tell, so a step in which it computes prompts says
nothing about it. A rank is named when the median of its slowness over a window is at least `straggler_ratio`, and
further above 1 than `straggler_noise` times the spread of the other ranks' (their median absolute deviation).

Pure: the same votes and the same state give the same answer everywhere, without another exchange. Knows no clock and
no tensor library; does not know what a rank does once it is named (see `worker` and `engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_high, median_low
from typing import Literal, NamedTuple, Protocol

from ..scheduling.votes import Vote

Action = Literal["off", "warn", "drain", "abort"]
ACTIONS = ("off", "warn", "drain", "abort")

MAX_SUSPECTS = 8
"""Ranks that are looked at closely in one step: the slowest. Others hold nobody up as long as these are there."""
MAX_NEIGHBOURS = 32
"""Other ranks whose spread is measured; more do not make it more certain."""
_MAD_TO_SIGMA = 1.4826
"""Of the normal distribution: standard deviation over median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerConfig:
    """What happens to a rank that is slow for long; equal on every rank."""

    straggler_action: Action = "warn"
    """What a rank gets that keeps the others waiting: warn names it, drain also sends it no new requests (DEGRADED),
    abort ends the group with its name, off does not look."""

    straggler_ratio: float = 1.5
    """A rank is slow when it takes so many times as long as the others would for its work."""

    straggler_window: int = 32
    """Steps over which the median counts; a rank that gets slow is named after about half of them, at most all."""

    straggler_noise: float = 4.0
    """A slow rank must also stand out by so many times the scatter of the other ranks."""

    def __post_init__(self) -> None:
        if self.straggler_action not in ACTIONS:
            raise ValueError(
                f"straggler_action is {self.straggler_action!r}; it must be one of {', '.join(ACTIONS)}, e.g. warn"
            )
        if not 1.0 < self.straggler_ratio < float("inf"):
            raise ValueError(f"straggler_ratio is {self.straggler_ratio}; it must be above 1, e.g. 1.5")
        if self.straggler_window < 4:
            raise ValueError(f"straggler_window is {self.straggler_window}; it must be at least 4, e.g. 32")
        if not 0.0 <= self.straggler_noise < float("inf"):
            raise ValueError(f"straggler_noise is {self.straggler_noise}; it must be at least 0, e.g. 4")


class Work(NamedTuple):
    """What one rank had to do in a step, as far as cost grows with it. `prefill_tokens` only says: do not judge."""

    decode_tokens: int
    context_tokens: int
    expert_pairs: int
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerState:
    """What the next judgement depends on besides the votes; equal on all ranks.

    ran          what each rank was to run in the step before, without its expert pairs; None when none was launched
    slowness     of each rank in the last steps, the newest last; None where nothing can be said
    slow_steps   steps in which each rank was slow, since the start
    slow         ranks that are named
    degraded     ranks that get no new requests, till the end: a drained rank has no work left to show that it is well
    """

    config: StragglerConfig = field(default_factory=StragglerConfig)
    ran: tuple[Work, ...] | None = None
    slowness: tuple[tuple[float | None, ...], ...] = ()
    slow_steps: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    degraded: tuple[int, ...] = ()

    def slow_steps_of(self, rank: int) -> int:
        """Steps in which this rank was slow; 0 before the first is judged."""
        return self.slow_steps[rank] if self.slow_steps else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to tell of `rank`: it is a straggler now, or (`slow` is False) no longer one. `slowness`: median."""

    rank: int
    slow: bool
    slowness: float
    window: int
    action: Action

    def __str__(self) -> str:
        if not self.slow:
            return f"rank {self.rank} keeps up with the others again"
        drained = "; it is DEGRADED and gets no new requests" if self.action == "drain" else ""
        return (
            f"rank {self.rank} is a straggler: over the last {self.window} steps it took {self.slowness:.1f} times as "
            f"long as the others would for its work, and they waited{drained}"
        )


class Launch(Protocol):
    """The part of a step's plan that says what ranks ran (see `heartbeat.StepPlan`)."""

    @property
    def bucket(self) -> int: ...

    @property
    def prefill_allowed(self) -> int | None: ...


def watch(votes: Sequence[Vote], plan: Launch, state: StragglerState) -> tuple[tuple[Finding, ...], StragglerState]:
    """Judge the step that `votes` report on, and remember what they and `plan` launch next."""
    if len(votes) == 1 or state.config.straggler_action == "off":
        return (), state
    findings: tuple[Finding, ...] = ()
    if state.ran is not None:
        works = [work._replace(expert_pairs=vote.expert_pairs) for work, vote in zip(state.ran, votes, strict=True)]
        findings, state = judge([vote.compute_us for vote in votes], works, state)
    return findings, replace(state, ran=tuple([_work(vote, plan) for vote in votes]) if plan.bucket else None)


def _work(vote: Vote, plan: Launch) -> Work:
    prefill = 0 if plan.prefill_allowed == 0 else vote.prefill_tokens
    return Work(vote.decode_tokens, vote.context_tokens, expert_pairs=0, prefill_tokens=prefill)


def judge(
    times_us: Sequence[int], works: Sequence[Work], state: StragglerState
) -> tuple[tuple[Finding, ...], StragglerState]:
    """One more step, in which rank r spent times_us[r] of its own on works[r]."""
    config = state.config
    row = slowness(times_us, works, ratio=config.straggler_ratio)
    rows = (*state.slowness, row)[-config.straggler_window :]
    late = [rank for rank, value in enumerate(row) if value is not None and value >= config.straggler_ratio]
    named = [rank for rank in late if rank not in state.slow and _stands_out(rows, rank, config)]
    well = [rank for rank in state.slow if rank not in state.degraded and _keeps_up(rows, rank, config)]
    slow = tuple(sorted({*state.slow, *named} - {*well}))
    degraded = slow if config.straggler_action == "drain" else ()
    findings = [_finding(rows, rank, config, slow=True) for rank in named]
    findings += [_finding(rows, rank, config, slow=False) for rank in well]
    return tuple(findings), replace(
        state,
        slowness=rows,
        slow_steps=_counted(state.slow_steps or (0,) * len(row), late),
        slow=slow,
        degraded=degraded,
    )


def slowness(times_us: Sequence[int], works: Sequence[Work], *, ratio: float) -> tuple[float | None, ...]:
    """Of each rank in one step; None where nothing can be said.

    Below `ratio` times the group's median nobody is held up, so there the median will do as a measure.
    """
    middle = max(median_low(times_us), 1)
    found: list[float | None] = [time / middle for time in times_us]
    suspects = [rank for rank, time in enumerate(times_us) if time >= ratio * middle]
    closely = sorted(suspects, key=lambda rank: -times_us[rank])[:MAX_SUSPECTS]
    for rank in suspects:
        found[rank] = _against_allowed(rank, times_us, works) if rank in closely else None
    return tuple([None if work.prefill_tokens else value for work, value in zip(works, found, strict=True)])


def _against_allowed(rank: int, times_us: Sequence[int], works: Sequence[Work]) -> float | None:
    allowed = [
        time * factor
        for peer, (time, work) in enumerate(zip(times_us, works, strict=True))
        if peer != rank and (factor := most_times(works[rank], work)) is not None
    ]
    return times_us[rank] / max(median(allowed), 1) if allowed else None


def most_times(work: Work, other: Work) -> float | None:
    """How many times as long `work` may take as `other` on an equal machine; None when there is no saying."""
    factor = 1.0
    for mine, theirs in zip(work[:3], other[:3], strict=True):
        if mine > theirs:
            if not theirs:
                return None
            factor = max(factor, mine / theirs)
    return factor


def _stands_out(rows: Sequence[Sequence[float | None]], rank: int, config: StragglerConfig) -> bool:
    mine = _column(rows, rank)
    if 2 * len(mine) < config.straggler_window or median_high(mine) < config.straggler_ratio:
        return False
    return median_high(mine) >= 1.0 + config.straggler_noise * _scatter(rows, rank)


def _keeps_up(rows: Sequence[Sequence[float | None]], rank: int, config: StragglerConfig) -> bool:
    mine = _column(rows, rank)
    return 2 * len(mine) >= config.straggler_window and median(mine) < (1.0 + config.straggler_ratio) / 2


def _scatter(rows: Sequence[Sequence[float | None]], rank: int) -> float:
    """How far the other ranks' slowness lies from each one's own median, as a standard deviation."""
    size = len(rows[-1])
    others = [(rank + offset) % size for offset in range(1, min(size, MAX_NEIGHBOURS + 1))]
    columns = [column for other in others if (column := _column(rows, other))]
    away = [abs(value - middle) for column in columns for middle in [median(column)] for value in column]
    return _MAD_TO_SIGMA * median(away) if away else 0.0


def _column(rows: Sequence[Sequence[float | None]], rank: int) -> list[float]:
    return [value for row in rows if (value := row[rank]) is not None]


def _counted(counts: tuple[int, ...], ranks: Iterable[int]) -> tuple[int, ...]:
    grown = list(counts)
    for rank in ranks:
        grown[rank] += 1
    return tuple(grown)


def _finding(rows: Sequence[Sequence[float | None]], rank: int, config: StragglerConfig, *, slow: bool) -> Finding:
    return Finding(
        rank=rank,
        slow=slow,
        slowness=median_high(_column(rows, rank)),
        window=len(rows),
        action=config.straggler_action,
    )
