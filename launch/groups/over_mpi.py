"""The MPI transport for ranks that mpirun started. Imported only when it is asked for: it needs mpi4py and an MPI."""

from __future__ import annotations

from ep import Transport
from ep.mpi import ONE_NODE, open_mpi

from .world import World


def open_transport(world: World) -> Transport:
    """Start MPI; on a single node it uses shared memory and opens no socket."""
    return open_mpi(parameters=ONE_NODE if world.num_nodes == 1 else None)
