"""`serried`, with experts that change places at random all the time; and, when asked, a rank that ends in a migration.

    python rebalancing.py KIND RANK -- WORDS OF SERRIED

KIND: none, kill (SIGKILL) or raise. It strikes RANK at its tenth exchange of experts. Rank 0 starts the others with the
same fault.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import runtime.loop.rebalance
from ep import Kind, Tag
from launch.cli import main
from launch.groups import group
from runtime.failure.recorder import StampedTransport
from tests.runtime.rebalancing import random_planner

TENTH = 10


def plant(kind: str, rank: int) -> None:
    plain = StampedTransport.all_to_all
    seen: list[Tag] = []

    def all_to_all(self, recv, send, *, tag, **splits):  # type: ignore[no-untyped-def]
        pending = plain(self, recv, send, tag=tag, **splits)
        if tag.kind is Kind.MIGRATE and self.rank == rank:
            seen.append(tag)
            if len(seen) == TENTH:
                if kind == "raise":
                    raise RuntimeError("planted")
                os.kill(os.getpid(), signal.SIGKILL)
        return pending

    StampedTransport.all_to_all = all_to_all


if __name__ == "__main__":
    kind, rank, cut, *words = sys.argv[1:]
    assert cut == "--", sys.argv
    runtime.loop.rebalance.planner_of = random_planner
    if kind != "none":
        plant(kind, int(rank))
    group.start_ranks = partial(group.start_ranks, command=[sys.executable, *sys.argv[:4]])
    sys.exit(main(words))
