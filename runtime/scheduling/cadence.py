"""When prompts are computed: on all ranks in the same steps, because every step lasts as long as its slowest rank.

    interval 1      every step; the cadence is off
    interval N      every Nth step, counted from the wave's start
    interval auto   when every rank that has prompts is ready, or when the bounded delay is over

    rank 0   d d P d d d P d d d        rank 0   d d d d P d d d P d     d decodes, P decodes and computes prompts;
    rank 1   d P d d P d d d d P        rank 1   d d d d P d d d P d     with P on any rank the step is long for all
             without: 5 long steps               with 4: 2 long steps

Pure: what follows depends on all ranks' votes and on the state alone, so every rank comes to the same. Knows no clock:
waiting times are votes, and their maximum is what counts. Knows no scheduler: it says how many prompt tokens a rank may
compute, the scheduler which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from .votes import Vote

Interval = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceConfig:
    """When prompts are computed; equal on every rank."""

    prefill_schedule_interval: Interval = 1
    """Compute prompts only in every Nth step, on all ranks in the same ones; 1: in every step; auto: when all that have
    prompts are ready, or when the longest delay is over."""

    prefill_max_delay_steps: int = 4
    """With interval auto: steps that prompts are put off, at most."""

    prefill_max_delay_ms: int = 500
    """With interval auto: milliseconds that prompts are put off, at most; the longest wait of any rank counts."""

    prefill_ready_tokens: int = 2048
    """With interval auto: a rank is ready when it has that many prompt tokens to compute."""

    itl_target_ms: float | None = None
    """Milliseconds that a step with prompts may take while others decode, by the cost model; unset: no limit."""

    def __post_init__(self) -> None:
        interval = self.prefill_schedule_interval
        if interval != "auto" and (not isinstance(interval, int) or interval < 1):
            raise ValueError(f"prefill_schedule_interval is {interval!r}; it must be auto or at least 1, e.g. 1")
        for name in ("prefill_max_delay_steps", "prefill_max_delay_ms", "prefill_ready_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 1")
        if self.itl_target_ms is not None and not self.itl_target_ms > 0:
            raise ValueError(f"itl_target_ms is {self.itl_target_ms}; it must be above 0, e.g. 50")


class Reason(StrEnum):
    """Why the prompts of a step are released or put off."""

    NO_PROMPTS = "no prompts"
    """No rank has one to compute."""
    OFF = "off"
    """The interval is 1."""
    NOTHING_DECODES = "nothing decodes"
    """No rank has a token to lose by it."""
    BEAT = "beat"
    """An Nth step."""
    READY = "ready"
    """Every rank with prompts is ready."""
    STEPS = "steps"
    """They were put off for as many steps as allowed."""
    TIME = "time"
    """Some rank's were put off for as long as allowed."""
    CAPACITY = "capacity"
    """The release before this one left prompts behind for lack of tokens, so the throttle is lifted."""
    DEFERRED = "deferred"
    """They wait for a better step."""
    HALTED = "halted"
    """Nothing is launched at all."""


class StepBudget(Protocol):
    """How many prompt tokens fit beside the decodes of a step; the same answer on every rank."""

    def prefill_tokens(self, *, decode_tokens: int, context_tokens: int, prefill_start: int) -> int:
        """For the largest decode_tokens, context_tokens and prefill_start that any rank votes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceTally:
    """What the cadence did, since the start; the same numbers on every rank.

    deferred_steps   steps in which some rank's prompts were put off
    releases         reason -> steps whose prompts were released for it
    tokens, room     tokens computed, and what they would have been with every rank as full as the fullest
    """

    deferred_steps: int = 0
    releases: tuple[tuple[Reason, int], ...] = ()
    tokens: int = 0
    room: int = 0

    @property
    def balance_ratio(self) -> float:
        """Mean over max of the tokens that ranks compute in a step, weighted by the step's length; 1.0 = level."""
        return self.tokens / self.room if self.room else 1.0

    def add(self, reason: Reason, tokens_R: Sequence[int]) -> CadenceTally:
        """After one more step, in which the ranks compute `tokens_R` tokens."""
        releases = self.releases
        if reason not in (Reason.NO_PROMPTS, Reason.DEFERRED):
            counts = dict(releases)
            counts[reason] = counts.get(reason, 0) + 1
            releases = tuple(counts.items())
        return CadenceTally(
            deferred_steps=self.deferred_steps + (reason is Reason.DEFERRED),
            releases=releases,
            tokens=self.tokens + sum(tokens_R),
            room=self.room + len(tokens_R) * max(tokens_R),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceState:
    """What the next decision depends on besides the votes.

    wave_step   steps run since the wave's start
    deferred    steps in a row, up to now, in which prompts were put off
    lifted      the last release left prompts behind for lack of tokens, and they are not computed yet
    """

    config: CadenceConfig = field(default_factory=CadenceConfig)
    budget: StepBudget | None = None
    wave_step: int = 0
    deferred: int = 0
    lifted: bool = False
    tally: CadenceTally = field(default_factory=CadenceTally)

    def next_wave(self) -> CadenceState:
        """At the start of another wave: nothing waits, steps count from 0; the tally goes on."""
        return replace(self, wave_step=0, deferred=0, lifted=False)


class Advance(NamedTuple):
    """The decision for one step: prompt tokens a rank may compute (None: all), the state after it, and why."""

    allowance: int | None
    state: CadenceState
    reason: Reason


def advance(votes: Sequence[Vote], state: CadenceState) -> Advance:
    """Decide whether this step computes prompts, and how many tokens of them on each rank.

    The allowance is the same for all ranks: none computes prompts while another puts its own off. Rows that decode, a
    request that lacks a single token among them, are never held: the allowance does not concern them.
    """
    limit = _limit(votes, state)
    reason = _reason(votes, state)
    allowance = 0 if reason is Reason.DEFERRED else limit
    tokens_R = [tokens_run(vote, allowance) for vote in votes]
    after = CadenceState(
        config=state.config,
        budget=state.budget,
        wave_step=state.wave_step + any(tokens_R),
        deferred=state.deferred + 1 if reason is Reason.DEFERRED else 0,
        lifted=_lifted(votes, state, reason, allowance),
        tally=state.tally.add(reason, tokens_R) if any(tokens_R) else state.tally,
    )
    return Advance(allowance, after, reason)


def tokens_run(vote: Vote, allowance: int | None) -> int:
    """Tokens that a rank computes in a step under this allowance."""
    prefill = vote.prefill_tokens if allowance is None else min(vote.prefill_tokens, allowance)
    return vote.decode_tokens + prefill


def _limit(votes: Sequence[Vote], state: CadenceState) -> int | None:
    """What the latency target leaves for prompts beside the decodes of this step; None when it leaves all."""
    decode_tokens = max([vote.decode_tokens for vote in votes])
    if state.budget is None or decode_tokens <= 0:
        return None
    tokens = state.budget.prefill_tokens(
        decode_tokens=decode_tokens,
        context_tokens=max([vote.context_tokens for vote in votes]),
        prefill_start=max([vote.prefill_start for vote in votes]),
    )
    return max(tokens, 1)


def _reason(votes: Sequence[Vote], state: CadenceState) -> Reason:
    config = state.config
    prompts = [vote for vote in votes if vote.prefill_tokens > 0]
    if not prompts:
        return Reason.NO_PROMPTS
    if config.prefill_schedule_interval == 1:
        return Reason.OFF
    if not any(vote.decode_tokens > 0 for vote in votes):
        return Reason.NOTHING_DECODES
    if state.lifted:
        return Reason.CAPACITY
    if config.prefill_schedule_interval != "auto":
        return Reason.DEFERRED if state.wave_step % config.prefill_schedule_interval else Reason.BEAT
    if all(vote.prefill_ready or vote.prefill_tokens >= config.prefill_ready_tokens for vote in prompts):
        return Reason.READY
    if state.deferred >= config.prefill_max_delay_steps:
        return Reason.STEPS
    if max([vote.oldest_prefill_wait_ms for vote in prompts]) >= config.prefill_max_delay_ms:
        return Reason.TIME
    return Reason.DEFERRED


def _lifted(votes: Sequence[Vote], state: CadenceState, reason: Reason, allowance: int | None) -> bool:
    """Whether prompts that have all they need but tokens stay behind: the step is too small for the queue.

    Prompts that wait for a slot or for pages do not count. More releases would not help them, and a throttle that is
    lifted whenever the cache is full would be lifted for good exactly where ranks most need to move together.
    """
    if reason is Reason.DEFERRED:
        return state.lifted
    if reason is Reason.NO_PROMPTS:
        return state.lifted and any(_out_of_tokens(vote) for vote in votes)
    cut = allowance is not None and any(vote.prefill_tokens > allowance for vote in votes)
    return cut or any(_out_of_tokens(vote) for vote in votes)


def _out_of_tokens(vote: Vote) -> bool:
    return vote.waiting > 0 and vote.spare_tokens <= 0
