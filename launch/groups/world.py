"""Who this process is among the ranks, read from the variables that launchers set.

    torchrun, Open MPI, PMI (Hydra: MPICH, Intel MPI), Slurm, alone        the first whose variables are there

Pure: environment in, World out. Variables that are half there or contradict each other are refused in words, because a
rank that guesses wrong would wait for others that never come. Knows launchers; does not know sockets, devices or flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .launchers import READERS, Claim, read_slurm

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank's place. Everything starts at 0."""

    rank: int
    size: int
    """Ranks of the group."""
    local_rank: int
    """Number of this rank on its node: its device."""
    local_size: int
    """Ranks on this node."""
    node_rank: int
    """Number of the node. MPI does not say: worked out as if ranks fill node after node, or go round all of them."""
    num_nodes: int
    source: str
    """Who started it, in words."""
    master_host: str = LOOPBACK
    """Where rank 0 runs; "" where nobody said, which only happens with several nodes."""
    master_port: int | None = None
    """The launcher's own store (torchrun). Not free for anything else."""
    run_id: str = ""
    """Tells this run from others on the node; "" where the launcher gives no name."""
    hint: str = ""
    """What the user may have meant instead; "" if nothing."""

    @property
    def is_primary(self) -> bool:
        """The rank that speaks: it holds the front, prints the answers and is met by all others."""
        return self.rank == 0

    @property
    def even_local_size(self) -> int:
        """Ranks of every node, where all have as many and nodes follow each other; else 1, each rank a node of its own.

        The order within a node says nothing: Open MPI deals local ranks by cores.
        """
        in_order = self.rank // self.local_size == self.node_rank
        return self.local_size if in_order and self.local_size * self.num_nodes == self.size else 1

    def describe(self) -> str:
        """What was found, in one line."""
        hint = f" ({self.hint})" if self.hint else ""
        if self.size == 1:
            return f"{self.source}: one rank{hint}"
        place = f"local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.num_nodes}"
        return f"{self.source}: rank {self.rank} of {self.size}, {place}{hint}"


def detect(environ: Mapping[str, str]) -> World:
    """The World that `environ` describes.

    Raises ValueError, with the variables and what to unset, when a launcher's variables are not all there, hold what
    cannot be, or when two launchers say different things.
    """
    chosen: Claim | None = None
    for read in READERS:
        if read is read_slurm and chosen is not None and chosen.certain:
            continue  # srun often starts the other launcher, once a node, and its variables are still there
        claim = read(environ)
        if claim is None:
            continue
        _check_range(claim)
        if chosen is not None:
            _check_agree(chosen, claim)
        chosen = chosen or claim
    return alone(hint=_batch_hint(environ)) if chosen is None else _world(chosen)


def alone(*, hint: str = "") -> World:
    """The only rank of its group."""
    return World(
        rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, source="no launcher", hint=hint
    )  # fmt: skip


def own_world(rank: int, size: int) -> World:
    """A rank that `serried --ranks` started: all on this machine."""
    return World(
        rank=rank, size=size, local_rank=rank, local_size=size, node_rank=0, num_nodes=1, source="own launcher"
    )  # fmt: skip


def check_ranks(world: World, asked: int | None) -> None:
    """ValueError when `--ranks` was given and a launcher started another number. One alone can start the others."""
    if asked is not None and asked != world.size and world.size > 1:
        raise ValueError(
            f"--ranks is {asked}, but {world.source} started {world.size}; leave --ranks out, or start {asked} ranks"
        )


def _check_range(claim: Claim) -> None:
    """The numbers of one launcher among themselves."""
    faults = (
        (claim.size < 1, f"{claim.says('size')}: there is at least one rank"),
        (not 0 <= claim.rank < claim.size, f"{claim.says('rank')}, with {claim.says('size')}: ranks count from 0"),
        (not 1 <= claim.local_size <= claim.size, f"{claim.says('local_size')}, with {claim.says('size')}"),
        (not 0 <= claim.local_rank < claim.local_size, f"{claim.says('local_rank')}, with {claim.says('local_size')}"),
        (
            claim.num_nodes is not None and (claim.num_nodes == 1) != (claim.local_size == claim.size),
            f"{claim.num_nodes} node(s), but {claim.says('local_size')} and {claim.says('size')}",
        ),
    )
    for wrong, words in faults:
        if wrong:
            raise ValueError(f"{claim.launcher} cannot have set {words}; start with {claim.launcher}, or {claim.unset}")


def _check_agree(chosen: Claim, other: Claim) -> None:
    for field in ("rank", "size", "local_rank"):
        if getattr(chosen, field) != getattr(other, field):
            raise ValueError(
                f"{chosen.launcher} and {other.launcher} contradict each other: {chosen.says(field)}, but "
                f"{other.says(field)}; if {chosen.launcher} started this, {other.unset}, otherwise {chosen.unset}"
            )


def _world(claim: Claim) -> World:
    node_rank, num_nodes = claim.node_rank, claim.num_nodes
    if node_rank is None or num_nodes is None:
        node_rank, num_nodes = _likely_node(claim)
    one_node = num_nodes == 1
    return World(
        rank=claim.rank,
        size=claim.size,
        local_rank=claim.local_rank,
        local_size=claim.local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        source=claim.launcher,
        master_host=claim.master_host or (LOOPBACK if one_node else ""),
        master_port=claim.master_port,
        run_id=claim.run_id,
    )


def _likely_node(claim: Claim) -> tuple[int, int]:
    """(node rank, nodes) by rank and local rank alone."""
    num_nodes = -(-claim.size // claim.local_size)
    fills_nodes = claim.rank % claim.local_size == claim.local_rank
    return (claim.rank // claim.local_size if fills_nodes else claim.rank % num_nodes), num_nodes


def _batch_hint(environ: Mapping[str, str]) -> str:
    """A batch script sees the variables of its job, but is no task of it."""
    tasks = environ.get("SLURM_NTASKS", "1")
    return f"in a Slurm job of {tasks} tasks; srun would start them all" if tasks not in ("", "1") else ""
