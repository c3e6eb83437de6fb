"""`serried`, with a fault planted in one rank: what a failing group does, seen from outside.

    python faulty.py KIND WHERE RANK STEP -- WORDS OF SERRIED

KIND: raise, kill (SIGKILL), stop (SIGSTOP). WHERE: dispatch, combine, vote, between. The fault strikes RANK in STEP, in
that part of the step. Rank 0 starts the others with the same planted fault.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from launch.cli import main
from launch.groups import group
from runtime.failure.recorder import Watched
from runtime.failure.verdict import Phase

PHASES = {"dispatch": Phase.DISPATCH, "combine": Phase.COMBINE, "vote": Phase.VOTE, "between": Phase.PROPOSE}


def strike(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("planted")
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def plant(kind: str, where: str, rank: int, step: int) -> None:
    plain: Callable[..., None] = Watched.stamp

    def stamp(self: Watched, phase: Phase, now: int, layer: int = 0) -> None:
        plain(self, phase, now, layer)
        if (phase, now, self._board.rank) == (PHASES[where], step, rank):
            strike(kind)

    Watched.stamp = stamp


if __name__ == "__main__":
    kind, where, rank, step, cut, *words = sys.argv[1:]
    assert cut == "--", sys.argv
    plant(kind, where, int(rank), int(step))
    group.start_ranks = partial(group.start_ranks, command=[sys.executable, *sys.argv[:6]])
    sys.exit(main(words))
