"""mpirun -n SIZE mpi_ranks.py FOLDER: scenarios over the ranks that mpirun started, each in a communicator of its own.
Every rank writes {SCENARIO: value, ...} to the file RANK.json in the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import scenarios
import torch

from ep.mpi import MPI, ONE_NODE, mpi_transport, open_mpi


def in_two_groups(_transport, folder):
    """Groups of even and of odd ranks, at the same time, do not hear each other."""
    world = MPI.COMM_WORLD
    group = world.Split(color=world.rank % 2, key=world.rank)
    transport = mpi_transport(group)
    assert transport.size == world.size // 2, transport.size
    found = scenarios.run(scenarios.inference_mode, transport, folder)
    group.Free()
    return found


def main(folder):
    torch.set_num_threads(1)
    first = open_mpi(parameters=ONE_NODE)
    found = {scenarios.sockets.__name__: scenarios.run(scenarios.sockets, first, folder)}
    for scenario in (*scenarios.PASSES, *scenarios.FAILS, in_two_groups):
        found[scenario.__name__] = scenarios.run(scenario, mpi_transport(MPI.COMM_WORLD), folder)
    (folder / f"{first.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
