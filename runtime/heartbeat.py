"""The agreement before every step: each rank votes one row of integers, a pure function of all rows is the plan.

Whatever could differ between ranks is settled here and nowhere else, so no rank branches around a collective on data
that only it has. `decide` knows nothing of tensors, transports or clocks: the same votes give every rank the same plan.

Order of one step (n) at async depth 1:

    propose(n)   vote(n) ---- all-gather ---- decide(votes) -> plan(n)   commit(n)   launch(n)   read(n - 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from ep import SerriedError


class Disagreement(SerriedError):
    """Two ranks voted different values for a field that must be equal: `field`, and the `culprit` rank."""

    def __init__(self, message: str, *, field: str, culprit: int, step: int) -> None:
        super().__init__(message, rank=culprit, step=step)
        self.field = field
        self.culprit = culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one rank says before a step; every field is one int64 of the row, in this order.

    sequence         steps this rank has agreed to so far
    epoch            placement epoch in force here
    config_hash      63 bits over everything that must be configured alike
    decode_tokens    tokens of rows that end in a sampled token and hold no prompt chunk
    prefill_tokens   tokens of all other rows
    unfinished       requests that have not ended, those in flight included
    in_flight        steps launched here whose tokens the host has not read
    """

    sequence: int
    epoch: int
    config_hash: int
    decode_tokens: int
    prefill_tokens: int
    unfinished: int
    in_flight: int

    def row(self) -> list[int]:
        """The vote as integers, in field order."""
        return list(astuple(self))

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Vote:
        """The inverse of `row()`."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, row, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every rank does in this step.

    step       its number, equal on all ranks
    bucket     the largest number of tokens any rank runs; 0 = no rank has a token, so nobody runs the layers
    epoch      placement epoch in force
    last       True when no rank has an unfinished request: the wave ends instead of a step
    stalled    True when work is left, no rank can move and nothing is in flight: a scheduler's fault, never waited out
    """

    step: int
    bucket: int
    epoch: int
    last: bool
    stalled: bool


MUST_AGREE = ("sequence", "epoch", "config_hash")


def decide(votes: Sequence[Vote]) -> StepPlan:
    """The plan that follows from all ranks' votes (index = rank); pure, and total once the votes agree.

    Raises Disagreement naming the field and the rank outside the majority (the highest such rank on a tie).
    """
    for name in MUST_AGREE:
        _check_agree(votes, name)
    bucket = max(vote.decode_tokens + vote.prefill_tokens for vote in votes)
    unfinished = any(vote.unfinished for vote in votes)
    moving = bucket > 0 or any(vote.in_flight for vote in votes)
    return StepPlan(
        step=votes[0].sequence,
        bucket=bucket,
        epoch=votes[0].epoch,
        last=not unfinished,
        stalled=unfinished and not moving,
    )


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
