"""What may go wrong in a simulated group: faults as values, drawn from a seed, and what they do to a step.

    harmless   a late vote, a slow rank, messages out of order: everything takes longer, and nothing else changes
    fatal      an error, a lost rank, a stuck rank, a row of another step: the group ends and names the culprit

Who finds a lost rank, and when, is the pulses' rule (`judge`) under the virtual clock. Knows steps and microseconds;
does not know requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..failure.board import Stamp, State
from ..failure.judge import Limits, Observation, Seen, judge
from ..failure.verdict import Phase, Reason, Verdict

FaultKind = Literal[
    "late-vote", "slow-rank", "reordered-messages", "raised-error", "lost-rank", "stuck-rank", "stale-vote"
]
FATAL: tuple[FaultKind, ...] = ("raised-error", "lost-rank", "stuck-rank", "stale-vote")
_PHASES = (Phase.BETWEEN, Phase.VOTE, Phase.DISPATCH, Phase.COMBINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong on `rank` (with reordered messages: on all) from `step` on.

    num_steps   how many steps it lasts; of no meaning for what ends the group
    phase       where in the step an error, a lost or a stuck rank strikes
    late_us     how much later a late vote comes; how far messages are spread that arrive in any order
    factor      how many times longer a slow rank takes for its own work
    """

    kind: FaultKind
    rank: int
    step: int
    num_steps: int = 1
    phase: Phase = Phase.VOTE
    late_us: float = 0.0
    factor: float = 1.0

    def __str__(self) -> str:
        where = "messages of all ranks" if self.kind == "reordered-messages" else f"rank {self.rank}"
        steps = f"step {self.step}" if self.num_steps == 1 else f"steps {self.step} to {self.step + self.num_steps - 1}"
        how = {
            "late-vote": f", {self.late_us / 1000:.0f} ms",
            "slow-rank": f", {self.factor:.1f} times as long",
            "reordered-messages": f", up to {self.late_us / 1000:.0f} ms late",
            "stale-vote": "",
        }.get(self.kind, f", {self.phase.name.lower()}")
        return f"{self.kind}: {where}, {steps}{how}"


def draw_fault(kind: FaultKind, *, ranks: int, first: int, last: int, seed: int) -> Fault:
    """A fault of that kind in a step from `first` to `last`; the same seed draws the same."""
    if kind not in get_args(FaultKind):
        raise ValueError(f"fault is {kind!r}; it must be one of {', '.join(get_args(FaultKind))}, e.g. late-vote")
    draw = random.Random(f"{seed} {kind}")
    return Fault(
        kind=kind,
        rank=draw.randrange(ranks),
        step=draw.randrange(first, last + 1),
        num_steps=draw.randrange(5, 15) if kind in ("slow-rank", "reordered-messages") else 1,
        phase=draw.choice(_PHASES),
        late_us=draw.uniform(20e3, 300e3),
        factor=draw.uniform(2.0, 4.0),
    )


class Mishaps:
    """The faults of a run, asked step by step. Delays are drawn in the order of the questions, from one seed."""

    def __init__(self, faults: Sequence[Fault], *, seed: int) -> None:
        self._faults = tuple(faults)
        self._draw = random.Random(f"{seed} messages")

    def vote_delay_us(self, rank: int, step: int) -> float:
        """How much later than usual the vote of `rank` arrives."""
        late = sum([fault.late_us for fault in self._now("late-vote", step) if fault.rank == rank])
        return late + self.request_delay_us(step)

    def request_delay_us(self, step: int) -> float:
        """How long a message sent during `step` is under way."""
        return sum([self._draw.uniform(0, fault.late_us) for fault in self._now("reordered-messages", step)])

    def factor(self, rank: int, step: int) -> float:
        """How many times longer `rank` takes for its own work."""
        return max([fault.factor for fault in self._now("slow-rank", step) if fault.rank == rank], default=1.0)

    def is_stale(self, rank: int, step: int) -> bool:
        """Whether `rank` says in this step what it said in the one before."""
        return any(fault.rank == rank for fault in self._now("stale-vote", step))

    def end(self, step: int, *, up_to: Phase) -> Fault | None:
        """The first thing in the program's order, at most in phase `up_to`, that stops a rank in this step."""
        kinds: tuple[FaultKind, ...] = ("raised-error", "lost-rank", "stuck-rank")
        found = [fault for kind in kinds for fault in self._now(kind, step) if fault.phase <= up_to]
        return min(found, key=lambda fault: (fault.phase, fault.rank), default=None)

    def _now(self, kind: FaultKind, step: int) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind == kind and 0 <= step - fault.step < fault.num_steps]


def find_culprit(fault: Fault, *, size: int, now_us: float, step_us: float, limits: Limits) -> tuple[Verdict, float]:
    """What the pulses find after `fault` has struck at `now_us`, and at what time (microseconds).

    step_us: how long a step is predicted to take. All other ranks wait for the culprit, in the phase it never ends.
    """
    if fault.kind == "raised-error":
        cause = "RuntimeError: an error of the simulation"
        verdict = Verdict(culprit=fault.rank, reason=Reason.RAISED, cause=cause, step=fault.step, phase=fault.phase)
        return verdict, now_us
    since = now_us / 1e6
    now = since
    while True:
        now += limits.beat_s
        seen = {rank: _seen(rank, fault, since=since, now=now, predicted_s=step_us / 1e6) for rank in range(size)}
        verdict = judge(seen, size=size, since=0.0, now=now, limits=limits)
        if verdict is not None:
            return verdict, now * 1e6


def _seen(rank: int, fault: Fault, *, since: float, now: float, predicted_s: float) -> Seen:
    """The pulse of a lost rank is gone with it; that of a stuck one goes on. The others get as far as they can."""
    is_culprit = rank == fault.rank
    phase = fault.phase if is_culprit else max(fault.phase, Phase.VOTE)
    stamp = Stamp(0, 0, fault.step, phase, 0, 0, waits=not is_culprit)
    observation = Observation(
        rank=rank, state=State.READY, settled=True, stamp=stamp, idle_s=now - since, predicted_s=predicted_s
    )
    return Seen(observation=observation, at=since if is_culprit and fault.kind == "lost-rank" else now)
