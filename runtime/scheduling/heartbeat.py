"""The agreement before every step: each rank votes one row of integers, a pure function of all rows is the plan.

Whatever could differ between ranks is settled here and nowhere else, so no rank branches around a collective on data
that only it has. `decide` knows nothing of tensors, transports or clocks: the same votes and the same state give every
rank the same plan and the same next state.

Order of one step (n) at async depth 1:

    propose(n)   vote(n) ---- all-gather ---- decide(votes, state) -> plan(n)   commit(n)   launch(n)   read(n - 1)

A *wave* goes from idle to idle. Pause and drain are wishes that every vote repeats, not events: said twice they mean
the same as once, and taking one back is enough to go on.

    pause    in force as soon as any rank wishes it: nothing is launched, what is in flight is read; `paused` when the
             votes show nothing in flight anywhere. Requests keep their pages; the first votes without the wish go on.
    drain    in force as soon as any rank wishes it: the door takes nothing new (see `routing`), steps go on as ever;
             `drained` when no rank has a request or a step in flight.

Votes also say up to which step everything is clean (see `rerun`): what the plan calls clean may be finished; what it
calls for again is run again instead of a new step, in a pause too, and the proposals of that step are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dbo.policy import Choice, OverlapState
from ep.errors import SerriedError

from .cadence import CadenceConfig, CadenceState, Reason, StepBudget, advance, tokens_run
from .overlap import decide_tracks
from .rerun import Overflows, find_clean
from .votes import Vote

__all__ = ["MUST_AGREE", "Disagreement", "HeartbeatState", "StepPlan", "Vote", "decide"]


class Disagreement(SerriedError):
    """Two ranks voted different values for a field that must be equal: `field`, and the `culprit` rank."""

    def __init__(self, message: str, *, field: str, culprit: int, step: int) -> None:
        super().__init__(message, rank=culprit, step=step)
        self.field = field
        self.culprit = culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatState:
    """What the next plan depends on besides the votes; equal on all ranks as long as they saw the same votes."""

    cadence: CadenceState = field(default_factory=CadenceState)
    overflows: Overflows = field(default_factory=Overflows)
    overlap: OverlapState = field(default_factory=OverlapState)
    wave: int = 0

    @classmethod
    def start(
        cls, config: CadenceConfig, *, budget: StepBudget | None = None, overlap: OverlapState | None = None
    ) -> HeartbeatState:
        """Before the first step. `budget` turns `config.itl_target_ms` into tokens (see `costs.ItlBudget`)."""
        return cls(cadence=CadenceState(config=config, budget=budget), overlap=overlap or OverlapState())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every rank does in this step.

    step              its number, equal on all ranks
    wave              waves that ended before it
    bucket            the largest number of tokens any rank runs; 0 = no rank has one, so nobody runs the layers
    epoch             placement epoch in force
    prefill_allowed   tokens that a rank may spend on rows that prefill; None = all it proposed
    reason            why prompts are released or put off
    last              the wave ends instead of a step: no rank has an unfinished request, nothing is in flight
    stalled           work is left, no rank can move, nothing is in flight and nothing is to come from outside: a
                      scheduler's fault, never waited out
    pause, paused     launch nothing; and nothing is in flight anywhere
    drain, drained    take no new request; and none is left anywhere
    failed            the lowest rank that votes an error, None when there is none: everybody stops
    clean             steps up to this one are clean on all ranks, and may be finished
    rerun_from        run again, exact, all steps from this one that are in flight, and nothing new; None = nothing
    capacity_level    how often the exchange's capacities were raised
    tracks            micro-batches that every rank cuts the step into
    track_tokens      the largest number of tokens any rank has in one of them
    overlap           why so many
    """

    step: int
    wave: int
    bucket: int
    epoch: int
    prefill_allowed: int | None
    reason: Reason
    last: bool
    stalled: bool
    pause: bool
    paused: bool
    drain: bool
    drained: bool
    failed: int | None
    clean: int
    rerun_from: int | None
    capacity_level: int
    tracks: int
    track_tokens: int
    overlap: Choice


MUST_AGREE = ("sequence", "epoch", "config_hash", "last_read")


def decide(votes: Sequence[Vote], state: HeartbeatState) -> tuple[StepPlan, HeartbeatState]:
    """The plan that follows from all ranks' votes (index = rank), and the state for the next ones.

    Pure, and total once the votes agree. Raises Disagreement naming the field and the rank outside the majority (the
    highest such rank on a tie).
    """
    for name in MUST_AGREE:
        _check_agree(votes, name)
    failed = next((rank for rank, vote in enumerate(votes) if vote.error), None)
    pause = any(vote.pause for vote in votes)
    drain = any(vote.drain for vote in votes)
    unfinished = any(vote.unfinished for vote in votes)
    clean, rerun_from = find_clean(votes)
    overflows = state.overflows if rerun_from is None else state.overflows.add(votes[0].sequence)
    quiet = rerun_from is None and not any(vote.in_flight for vote in votes)
    last = failed is None and quiet and not unfinished
    allowed, cadence, reason = 0, state.cadence, Reason.HALTED
    if unfinished and not pause and rerun_from is None and failed is None:
        allowed, cadence, reason = advance(votes, state.cadence)
    bucket = 0 if reason is Reason.HALTED else max([tokens_run(vote, allowed) for vote in votes])
    cut = decide_tracks(votes, state.overlap, bucket=bucket, prefill_allowed=allowed)
    plan = StepPlan(
        step=votes[0].sequence,
        wave=state.wave,
        bucket=bucket,
        epoch=votes[0].epoch,
        prefill_allowed=allowed,
        reason=reason,
        last=last,
        stalled=reason is not Reason.HALTED and bucket <= 0 and quiet and not any(vote.awaiting for vote in votes),
        pause=pause,
        paused=pause and quiet,
        drain=drain,
        drained=drain and last,
        failed=failed,
        clean=clean,
        rerun_from=rerun_from,
        capacity_level=overflows.level,
        tracks=cut.tracks,
        track_tokens=cut.track_tokens,
        overlap=cut.choice,
    )
    cadence = cadence.next_wave() if last else cadence
    return plan, HeartbeatState(cadence=cadence, overflows=overflows, overlap=cut.state, wave=state.wave + last)


def _check_agree(votes: Sequence[Vote], name: str) -> None:
    values = [getattr(vote, name) for vote in votes]
    if len(set(values)) == 1:
        return
    common = max(values, key=lambda value: (values.count(value), -values.index(value)))
    culprit = max(rank for rank, value in enumerate(values) if value != common)
    raise Disagreement(
        f"ranks disagree on {name} before step {votes[0].sequence}: rank {culprit} says {values[culprit]}, "
        f"rank {values.index(common)} says {common}",
        field=name,
        culprit=culprit,
        step=votes[0].sequence,
    )
