"""When steps are run again, and when the exchange's capacities are raised: what follows from all ranks' votes.

An exchange of fixed capacity may leave rows behind. A step is *clean* on a rank when nothing was left behind there; the
flag is read with the tokens. Until all ranks are clean up to a step, nothing leaves it; where one is not, every rank
runs that step and those after it again, exact.

    rank 0   read up to 7, clean up to 7      plan: steps up to 5 are finished, 6 and 7 (and what is launched
    rank 1   read up to 7, clean up to 5            after them) are run again

Pure, and imports no tensor library: the same votes and the same state give the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ep.terms import MOST_LEVEL

from .votes import Vote

WINDOW = 64
"""Steps that are looked back over."""
MANY = 3
"""So many re-runs in a window raise the capacities: one costs about two steps, larger capacities cost every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflows:
    """What is remembered of overflows; the same on every rank.

    level    how often the capacities were raised since the start
    recent   steps of the last WINDOW that ordered a re-run, at the present level; fewer than MANY are kept
    """

    level: int = 0
    recent: tuple[int, ...] = ()

    def add(self, step: int) -> Overflows:
        """After a re-run that is ordered in `step`."""
        recent = (*[one for one in self.recent if one > step - WINDOW], step)
        if self.level >= MOST_LEVEL:
            return Overflows(level=self.level, recent=recent[1 - MANY :])
        return Overflows(level=self.level + 1) if len(recent) >= MANY else Overflows(level=self.level, recent=recent)


class Cleanness(NamedTuple):
    """All ranks are clean up to step `clean`; `rerun_from` is the first step to run again, None when all is clean."""

    clean: int
    rerun_from: int | None


def find_clean(votes: Sequence[Vote]) -> Cleanness:
    """From votes that agree on `last_read`."""
    clean = min([vote.last_clean for vote in votes])
    return Cleanness(clean, clean + 1 if clean < votes[0].last_read else None)


def raise_words(level: int) -> str:
    """What a user is told when the capacities have been raised."""
    so_high = ", as high as they get" if level >= MOST_LEVEL else ""
    return (
        f"the exchange's capacities are raised to level {level}{so_high}: {MANY} of the last {WINDOW} steps had more "
        "rows than fit and were run again; with --exchange exact no step ever has"
    )
