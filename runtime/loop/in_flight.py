"""The steps that were launched here and are not finished, in order.

    | finished | read: tokens on the host, waits to be clean everywhere | launched: not read |
                                                                        ^ last_read

To read a step brings its tokens and its overflow flag to the host; to finish it lets them out. Knows the order of steps
and which are clean on this rank; does not know the other ranks, nor what finishing does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..requests.rows import Samples
from ..sampling.samples import read_rows
from .launcher import Launched


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStep:
    """A step on the host."""

    launched: Launched
    samples: Samples


class InFlight:
    """One rank's unfinished steps.

    last_read       number of the newest step that was read; -1 before any
    last_clean      nothing was left behind here in any step up to this one
    num_overflows   launches in which something was left behind here, looked at when they are read or discarded
    """

    def __init__(self) -> None:
        self.unread: deque[Launched] = deque()
        self.unfinished: deque[ReadStep] = deque()
        self.last_read = -1
        self.last_clean = -1
        self.num_overflows = 0

    def __len__(self) -> int:
        return len(self.unfinished) + len(self.unread)

    @property
    def buckets(self) -> list[int]:
        """Of each step, oldest first."""
        return [step.plan.bucket for step in (*[one.launched for one in self.unfinished], *self.unread)]

    def add(self, step: Launched) -> None:
        """One more was launched."""
        self.unread.append(step)

    def read(self) -> Launched:
        """Wait for the oldest step that is not read, and return it."""
        step = self.unread.popleft()
        clean_so_far = self.last_clean == self.last_read
        self.last_read = step.plan.step
        if not self._has_overflowed(step) and clean_so_far:
            self.last_clean = step.plan.step
        samples = read_rows(step.rows, step.sampled, step.tokens())
        self.unfinished.append(ReadStep(launched=step, samples=samples))
        return step

    def take_clean(self, clean: int) -> list[ReadStep]:
        """Those up to step `clean`, oldest first; they are in flight no more."""
        steps = []
        while self.unfinished and self.unfinished[0].launched.plan.step <= clean:
            steps.append(self.unfinished.popleft())
        return steps

    def discard(self) -> list[Launched]:
        """Forget what all steps brought, read or not, and return them to be launched again in this order."""
        for step in self.unread:
            self._has_overflowed(step)
        steps = [*[one.launched for one in self.unfinished], *self.unread]
        self.unfinished.clear()
        self.unread.clear()
        if steps:
            self.last_read = self.last_clean = steps[0].plan.step - 1
        return steps

    def _has_overflowed(self, step: Launched) -> bool:
        """Waits for the step, and not for what the device was given since."""
        overflowed = step.overflowed()
        self.num_overflows += overflowed
        return overflowed
