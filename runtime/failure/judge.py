"""The rules by which a group finds out that a rank has failed, and which: pure functions of what the pulses have seen.

Knows observations and limits; reads no clock, no process and no socket, so that every rule is tested without waiting.
Times are seconds of whoever judges; how long something has lasted is counted where it is seen, since clocks of two
machines do not agree.

    raised     at once; what was raised because of another rank counts only if nothing better comes (`second_hand_s`)
    gone       at once
    stopped    in state T at every look for `stopped_s`, without having run in between
    silent     nothing heard of its pulse for `silent_s`
    stuck      the rank that is behind all others has not stamped for max(stuck_s, stuck_steps x predicted step)

A group that is not warmed up has the longer limits: a rank loads, compiles or runs its first step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields

from .board import Stamp, State
from .verdict import BEFORE_STEPS, Phase, Reason, Verdict, place_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All times that decide something, in seconds."""

    beat_s: float = 0.25
    """A pulse is felt, and passed on, as often as this."""
    silent_s: float = 2.0
    """A pulse that is not heard for so long is dead, after warm-up."""
    warmup_silent_s: float = 30.0
    """The same before the rank is warmed up, when the machine is busy with loading."""
    come_s: float = 120.0
    """How long ranks may take to appear at all."""
    stopped_s: float = 1.25
    """A process that is stopped for so long is dead; a throttled one runs now and then."""
    stuck_s: float = 10.0
    """A group without progress is stuck after so long, after warm-up."""
    stuck_steps: float = 5.0
    """The same in steps of the predicted length; the longer of the two counts."""
    warmup_stuck_s: float = 1800.0
    """The same before the group is warmed up: hundreds of gigabytes are loaded without a stamp."""
    second_hand_s: float = 1.0
    """How long an error that another rank has caused waits for that rank's own word."""
    end_s: float = 1.0
    """What a rank gets to end itself after a verdict, before its pulse kills it."""
    leave_s: float = 10.0
    """How far apart ranks may end in order."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} = {value}: must be positive, for example {field.default}")
        if self.silent_s < 3 * self.beat_s:
            raise ValueError(f"silent_s = {self.silent_s}: must be at least 3 beats, which is {3 * self.beat_s:g}")


_OBSERVATION = struct.Struct("<11q")
OBSERVATION_BYTES = _OBSERVATION.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a pulse sees of its rank. `stamp` is None before the first; `idle_s`: for how long it has been the last."""

    rank: int
    state: State
    settled: bool
    """Ready, and past its first step: from now on a step takes as long as it should."""
    stamp: Stamp | None
    idle_s: float
    predicted_s: float

    def pack(self) -> bytes:
        """OBSERVATION_BYTES bytes."""
        stamp = self.stamp or Stamp(-1, 0, -1, Phase.BETWEEN, 0, 0, waits=False)
        times = (int(self.idle_s * 1e6), int(self.predicted_s * 1e6))
        return _OBSERVATION.pack(self.rank, self.state, self.settled, *times, stamp.number, *stamp[2:])

    @classmethod
    def unpack(cls, packed: bytes) -> Observation:
        """The inverse of `pack`, except for the stamp's time, which means nothing on another machine."""
        rank, state, settled, idle, predicted, number, step, phase, *rest = _OBSERVATION.unpack(packed)
        layer, exchanges, waits = rest
        stamp = Stamp(number, 0, step, Phase(phase), layer, exchanges, waits=bool(waits))
        return cls(
            rank=rank,
            state=State(state),
            settled=bool(settled),
            stamp=stamp if number >= 0 else None,
            idle_s=idle / 1e6,
            predicted_s=predicted / 1e6,
        )

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """Where the rank stands; before all others without a stamp."""
        return self.stamp.place if self.stamp is not None else (-1, 0, 0, False)

    @property
    def words(self) -> str:
        """Where the rank stands, for people."""
        return place_words(*self._where)

    @property
    def _where(self) -> tuple[int, Phase, int]:
        stamp = self.stamp
        return (stamp.step, stamp.phase, stamp.layer) if stamp is not None else (BEFORE_STEPS, Phase.BETWEEN, 0)

    def blame(self, reason: Reason, cause: str) -> Verdict:
        """A verdict against this rank, where it stands."""
        step, phase, layer = self._where
        return Verdict(culprit=self.rank, reason=reason, cause=cause, step=step, phase=phase, layer=layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The last that was heard of a rank, and when (seconds of the judge)."""

    observation: Observation
    at: float


def judge(seen: Mapping[int, Seen], *, size: int, since: float, now: float, limits: Limits) -> Verdict | None:
    """The failure that follows from what was heard last of every rank; None while all is well.

    since: when the judge began. Ranks that have ended in order are of no interest any more.
    """
    return (
        judge_absence(seen, size=size, since=since, now=now, limits=limits)
        or judge_silence(seen, now=now, limits=limits)
        or judge_progress(seen, size=size, limits=limits)
        or judge_leaving(seen, size=size, now=now, limits=limits)
    )


def judge_absence(seen: Mapping[int, Seen], *, size: int, since: float, now: float, limits: Limits) -> Verdict | None:
    """The first of the ranks that have never come, once they should have."""
    missing = [rank for rank in range(size) if rank not in seen]
    if not missing or now - since <= limits.come_s:
        return None
    cause = f"{_ranks(missing)} did not come within {limits.come_s:g} s"
    return Verdict(culprit=missing[0], reason=Reason.SILENT, cause=cause)


def judge_silence(seen: Mapping[int, Seen], *, now: float, limits: Limits) -> Verdict | None:
    """The rank that has been silent for longest, and too long."""
    silent = {rank: now - last.at for rank, last in seen.items() if _is_silent(last, now, limits)}
    if not silent:
        return None
    culprit = max(silent, key=lambda rank: (silent[rank], -rank))
    others = f", and of {_ranks(sorted(set(silent) - {culprit}))}" if len(silent) > 1 else ""
    cause = f"nothing was heard of its pulse for {silent[culprit]:.1f} s{others}"
    return seen[culprit].observation.blame(Reason.SILENT, cause)


def _is_silent(last: Seen, now: float, limits: Limits) -> bool:
    state = last.observation.state
    return state is not State.ENDED and now - last.at > silent_after(state, limits)


def silent_after(state: State, limits: Limits) -> float:
    """How long a pulse may be silent whose rank is in `state`."""
    return limits.silent_s if state >= State.READY else limits.warmup_silent_s


def judge_progress(seen: Mapping[int, Seen], *, size: int, limits: Limits) -> Verdict | None:
    """The rank that all others wait for, when somebody has waited too long.

    That is the one whose place in the program is behind all others'. While it still stamps it is slow, not stuck; and
    while another does, what was heard of it may be older than what has moved that one: nobody has waited yet. One
    that is IDLE does not stamp: it is to blame once another has waited too long for it. A group that is idle as a whole
    waits for nobody.
    """
    here = [last.observation for last in seen.values() if last.observation.state is not State.ENDED]
    if len(here) < size or all(_is_idle(one) for one in here):
        return None
    limit = stuck_after(here, limits)
    behind = min(here, key=lambda one: (one.place, one.rank))
    others = [one.idle_s for one in here if one is not behind and not _is_idle(one)]
    waited = max(others) if _is_idle(behind) else min([behind.idle_s, *others])
    if waited <= limit:
        return None
    waiting = sorted((one for one in here if one.place > behind.place), key=lambda one: one.rank)
    doing = "does not step" if _is_idle(behind) else "makes no progress"
    cause = f"{doing} for {waited:.1f} s ({limit:g} s are allowed)"
    if waiting:
        cause += f"; {_ranks([one.rank for one in waiting])} wait for it, {waiting[0].words}"
    elif size > 1:
        cause += "; all ranks stand there"
    return behind.blame(Reason.STUCK, cause)


def judge_leaving(seen: Mapping[int, Seen], *, size: int, now: float, limits: Limits) -> Verdict | None:
    """Ranks end in order together; the odd ones out, when some have ended for `leave_s` and some go on."""
    ended = [rank for rank, last in seen.items() if last.observation.state is State.ENDED]
    late = [rank for rank in seen if rank not in ended]
    if not ended or not late:
        return None
    first = min(ended, key=lambda rank: seen[rank].at)
    if now - seen[first].at <= limits.leave_s:
        return None
    if 2 * len(ended) < size:
        cause = f"it has ended, and {_ranks(late)} still go on after {limits.leave_s:g} s"
        return seen[first].observation.blame(Reason.GONE, cause)
    cause = f"it still goes on {limits.leave_s:g} s after rank {first} has ended"
    return seen[late[0]].observation.blame(Reason.STUCK, cause)


def stuck_after(here: list[Observation], limits: Limits) -> float:
    """How long a rank of this group may go without a stamp."""
    if not all(one.settled for one in here):
        return limits.warmup_stuck_s
    return max(limits.stuck_s, limits.stuck_steps * max(one.predicted_s for one in here))


def _is_idle(one: Observation) -> bool:
    """IDLE, or ready and without a step so far."""
    return one.stamp.phase is Phase.IDLE if one.stamp is not None else one.state >= State.READY


def _ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 3", or the first few and how many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
