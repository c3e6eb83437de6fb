"""What each launcher says in its variables. A reader returns a Claim, or None where the launcher was not there.

    torchrun   RANK  WORLD_SIZE  LOCAL_RANK  LOCAL_WORLD_SIZE   GROUP_RANK  GROUP_WORLD_SIZE  MASTER_ADDR  MASTER_PORT
    Open MPI   OMPI_COMM_WORLD_  RANK  SIZE  LOCAL_RANK  LOCAL_SIZE                (its NODE_RANK is a local rank, too)
    PMI        PMI_RANK  PMI_SIZE  MPI_LOCALRANKID  MPI_LOCALNRANKS
    Slurm      SLURM_PROCID  SLURM_STEP_NUM_TASKS or SLURM_NTASKS  SLURM_LOCALID  SLURM_NODEID  SLURM_STEP_NODELIST ...

Knows names and formats of variables; does not know which launcher is to be believed (see `world`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

Environ = Mapping[str, str]
FOUR = ("rank", "size", "local_rank", "local_size")

MAX_NODES = 1 << 16
SPECIAL_STEPS = 0xFFFF_FFF0
"""Slurm's numbers for steps that `srun` did not start for the user: batch script, interactive shell, extern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one launcher says; None and "" where it does not say."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    names: Mapping[str, str]
    """Number -> the variable that it was read from."""
    node_rank: int | None = None
    num_nodes: int | None = None
    master_host: str = ""
    master_port: int | None = None
    run_id: str = ""
    certain: bool = True
    """Set by that launcher for sure; plain RANK and WORLD_SIZE are often exported by hand."""

    def says(self, number: str) -> str:
        """ "RANK = 3" """
        return f"{self.names[number]} = {getattr(self, number)}"

    @property
    def unset(self) -> str:
        """How to get rid of what this launcher says."""
        return f"unset {' '.join(dict.fromkeys(self.names.values()))}"


def read_torchrun(environ: Environ) -> Claim | None:
    """torchrun, and whoever exports the same variables."""
    claim = _claim(environ, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if claim is None:
        return None
    port, restarts = _number(environ, "MASTER_PORT"), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    return replace(
        claim,
        node_rank=_number(environ, "GROUP_RANK"),
        num_nodes=_number(environ, "GROUP_WORLD_SIZE"),
        master_host=environ.get("MASTER_ADDR", ""),
        master_port=port,
        run_id=f"{run_id} {port} {restarts}" if port is not None else "",
        certain=bool(run_id),
    )


def read_open_mpi(environ: Environ) -> Claim | None:
    """mpirun of Open MPI."""
    claim = _claim(environ, "mpirun", *(f"OMPI_COMM_WORLD_{number.upper()}" for number in FOUR))
    return None if claim is None else replace(claim, run_id=environ.get("PMIX_NAMESPACE", ""))


def read_pmi(environ: Environ) -> Claim | None:
    """Hydra, the mpiexec of MPICH and Intel MPI. Slurm has a PMI without local ranks; `read_slurm` knows them all."""
    if _is_step(environ) and "MPI_LOCALRANKID" not in environ:
        return None
    return _claim(environ, "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_slurm(environ: Environ) -> Claim | None:
    """srun. The batch script of a job has most of the variables too, but is no task of a step."""
    if not _is_step(environ):
        return None
    names = {
        "rank": "SLURM_PROCID",
        "size": _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
    }
    tasks_name = _first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    hosts_name = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not _all_there(environ, "srun", [*names.values(), tasks_name, hosts_name]):
        return None
    tasks, hosts = tasks_per_node(environ[tasks_name]), expand_hosts(environ[hosts_name])
    node_rank = _whole(environ, "SLURM_NODEID")
    if len(tasks) != len(hosts) or not 0 <= node_rank < len(hosts):
        raise ValueError(
            f"srun cannot have set {tasks_name} = {environ[tasks_name]!r} ({len(tasks)} nodes), "
            f"{hosts_name} = {environ[hosts_name]!r} ({len(hosts)} nodes) and SLURM_NODEID = {node_rank} together; "
            "start with srun, or unset SLURM_STEP_ID"
        )
    return Claim(
        launcher="srun",
        rank=_whole(environ, names["rank"]),
        size=_whole(environ, names["size"]),
        local_rank=_whole(environ, names["local_rank"]),
        local_size=tasks[node_rank],
        names=names | {"local_size": tasks_name, "step": "SLURM_STEP_ID"},
        node_rank=node_rank,
        num_nodes=len(hosts),
        master_host=hosts[0] if len(hosts) > 1 else "",
        run_id=".".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    )


READERS: Sequence[Callable[[Environ], Claim | None]] = (read_torchrun, read_open_mpi, read_pmi, read_slurm)
"""In the order in which they are believed."""


def tasks_per_node(text: str) -> list[int]:
    """ "2(x3),1" -> [2, 2, 2, 1]"""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or int(found[2] or 1) > MAX_NODES:
            raise ValueError(f"{text!r} is no list of tasks per node; Slurm writes it like '2(x3),1'")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """ "gpu[08-10,12],login1" -> ["gpu08", "gpu09", "gpu10", "gpu12", "login1"]

    Several brackets in one name multiply, the last one fastest.
    """
    if not re.fullmatch(r"(?:[\w.-]|\[[\d,-]+\]|,)+", text):
        raise ValueError(f"{text!r} is no list of nodes; Slurm writes it like 'gpu[01-03,07],login1'")
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
    hosts = list(islice(chain.from_iterable(map(_expand_part, parts)), MAX_NODES + 1))
    if len(hosts) > MAX_NODES:
        raise ValueError(f"{text!r} lists more than {MAX_NODES} nodes")
    return hosts


def _expand_part(part: str) -> list[str]:
    """One part, which has no comma outside of brackets."""
    begin, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    tails = _expand_part(tail)
    numbers = chain.from_iterable(map(_expand_range, inside.split(",")))
    return [begin + number + end for number in numbers for end in tails]


def _expand_range(text: str) -> list[str]:
    """ "08-10" -> ["08", "09", "10"]"""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ValueError(f"[{text}] is no range of nodes; Slurm writes it like [01-03]")
    first, last = int(found[1]), int(found[2] or found[1])
    if last - first > MAX_NODES:
        raise ValueError(f"[{text}] lists more than {MAX_NODES} nodes")
    return [str(number).zfill(len(found[1])) for number in range(first, last + 1)]


def _is_step(environ: Environ) -> bool:
    """Did srun start this process as a task?"""
    step = _number(environ, "SLURM_STEP_ID")
    return step is not None and step < SPECIAL_STEPS


def _first_set(environ: Environ, *names: str) -> str:
    """The first of these variables that is set; the first of all if none is."""
    return next((name for name in names if name in environ), names[0])


def _claim(environ: Environ, launcher: str, *names: str) -> Claim | None:
    """What the variables `names` say, which hold FOUR; None when there is none of them."""
    if not _all_there(environ, launcher, names):
        return None
    rank, size, local_rank, local_size = (_whole(environ, name) for name in names)
    return Claim(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        names=dict(zip(FOUR, names, strict=True)),
    )


def _all_there(environ: Environ, launcher: str, names: Sequence[str]) -> bool:
    """Raises ValueError when there are some only."""
    there = [name for name in names if name in environ]
    missing = [name for name in names if name not in environ]
    if there and missing:
        raise ValueError(
            f"{', '.join(f'{name} = {environ[name]!r}' for name in there)} without {', '.join(missing)}: {launcher} "
            f"sets them all; start with {launcher}, or unset {' '.join(there)}"
        )
    return bool(there)


def _number(environ: Environ, name: str) -> int | None:
    return _whole(environ, name) if environ.get(name) else None


def _whole(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} = {environ[name]!r} is no whole number; unset {name}") from None
