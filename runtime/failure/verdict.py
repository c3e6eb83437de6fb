"""Who failed, where and why: one small value that travels between pulses, lies on boards and ends a group.

Knows phases and words; does not know how a failure is found (see `judge`) nor how a rank ends (see `pulse`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

TEXT_BYTES = 480
"""A cause is cut to as many bytes of UTF-8."""


BEFORE_STEPS, UNKNOWN_STEP = -1, -2


class Phase(IntEnum):
    """Where in a step a rank stands, in the order of the program. The numbers are stored: add, never renumber.

    IDLE: waits for work that may never come, on purpose; a rank may stay here for ever. Every rank of a group that
    waits for its next wave is IDLE, in whatever call it waits.
    DISPATCH and COMBINE: from the moment such an exchange begins until the next begins, so the experts run in DISPATCH.
    """

    IDLE = 0
    BETWEEN = 1
    PROPOSE = 2
    VOTE = 3
    COMMIT = 4
    LAUNCH = 5
    DISPATCH = 6
    COMBINE = 7
    SAMPLE = 8
    READ = 9
    MIGRATE = 10


class Reason(IntEnum):
    """How a rank failed. The numbers are stored: add, never renumber."""

    RAISED = 1  # an exception of its own
    GONE = 2  # its process has ended without saying so
    STOPPED = 3  # its process is stopped (state T)
    SILENT = 4  # nothing is heard of it
    STUCK = 5  # it lives, and gets no further
    LOST = 6  # another rank could not reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Rank `culprit` failed; `cause` says how, in one line without its name.

    step, phase, layer: where it stood; step is BEFORE_STEPS before its first, UNKNOWN_STEP when nobody knows. layer is
    0 outside DISPATCH and COMBINE.
    """

    culprit: int
    reason: Reason
    cause: str
    step: int = UNKNOWN_STEP
    phase: Phase = Phase.BETWEEN
    layer: int = 0

    def __str__(self) -> str:
        place = "" if self.step == UNKNOWN_STEP else f" {place_words(self.step, self.phase, self.layer)}"
        return f"rank {self.culprit} failed{place}: {self.cause}"


def place_words(step: int, phase: Phase, layer: int) -> str:
    """ "in step 7, dispatch of layer 3", as far as there is anything to say."""
    if step == UNKNOWN_STEP:
        return "nobody knows where"
    if step == BEFORE_STEPS:
        return "before its first step"
    if phase in (Phase.DISPATCH, Phase.COMBINE):
        return f"in step {step}, {phase.name.lower()} of layer {layer}"
    return f"in step {step}, {phase.name.lower()}"


def one_line(text: str) -> str:
    """`text` without line breaks, cut to TEXT_BYTES."""
    joined = " ".join(text.split())
    encoded = joined.encode(errors="replace")
    return joined if len(encoded) <= TEXT_BYTES else encoded[: TEXT_BYTES - 3].decode(errors="ignore") + "..."


_VERDICT = struct.Struct(f"<qqqqqq{TEXT_BYTES}s")
VERDICT_BYTES = _VERDICT.size


def pack_verdict(verdict: Verdict) -> bytes:
    """VERDICT_BYTES bytes; the text goes through `one_line`."""
    text = one_line(verdict.cause).encode(errors="replace")
    return _VERDICT.pack(verdict.culprit, verdict.reason, verdict.step, verdict.phase, verdict.layer, len(text), text)


def unpack_verdict(packed: bytes | memoryview) -> Verdict:
    """The inverse of `pack_verdict`."""
    culprit, reason, step, phase, layer, length, text = _VERDICT.unpack(packed)
    return Verdict(
        culprit=culprit,
        reason=Reason(reason),
        step=step,
        phase=Phase(phase),
        layer=layer,
        cause=text[:length].decode(errors="replace"),
    )
