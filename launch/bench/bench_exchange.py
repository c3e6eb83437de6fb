"""`serried bench exchange`: what dispatch and combine take, against the transport's own all-to-all of the same bytes.

Prints the question, the machine, the commit, the settings, then a table, then one last line of JSON. Ranks are
processes, started and met like those of `generate`, or threads of this one. Knows how it is said; what is measured is
`ep.exchange_bench`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console

from ep import ExchangeConfig, Topology, Transport, choose, run_ranks
from ep.back_ends import refusal
from ep.exchange_bench import Load, bench_tags, measure
from runtime.weights.hardware import Hardware, read_hardware

from ..command.wide_table import print_table
from ..groups.as_rank import hush
from ..groups.group import Start, meet_ranks
from ..groups.place import cpu_transport, open_transport
from ..groups.refusal import refusals
from ..groups.rendezvous import RendezvousConfig
from ..groups.world import World, check_ranks, detect, own_world
from .bench import commit, machine_line
from .bench_rates import check_exchange_target, save_exchange
from .exchange_race import race, tell_race, ways
from .exchange_report import Line, exchange_table, us_of_bytes

ABOUT = """\
Measure what dispatch and combine take among the ranks, against the transport's plain all-to-all of the same bytes.

Examples:
  serried bench exchange --ranks 4
  serried bench exchange --ranks 8 --node-size 2 --hierarchical on --transport threads
  serried bench exchange --ranks 4 --tokens 16 128 --exchange bounded --combine slots
  mpirun -n 4 python -m launch bench exchange

Routing is uniform and random. Ranks that share cores take turns on them: compare the columns of one line.
"""

DONE = 0
DEFAULT_RANKS = 4
TARGET_RATIO = 1.3
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
QUESTION = "How long do dispatch and combine take, against the transport's plain all-to-all of the same bytes?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFlags:
    """What `serried bench exchange` is told."""

    ranks: int | None = None
    """Ranks that exchange, each a process; unset: 4, or as many as the launcher started."""

    tokens: tuple[int, ...] = (16, 128)
    """Tokens of each rank; a line of the table for each."""

    hidden: tuple[int, ...] = (7168,)
    """Values of a token; a line of the table for each."""

    slots: int = 64
    """Expert slots of each rank."""

    top_k: int = 8
    """Experts of a token."""

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Number format of the run."""

    node_size: int | None = None
    """Ranks that count as one node; unset: all. What leaves a node counts as network."""

    rounds: int = 20
    """Measured rounds; medians are told."""

    transport: Literal["auto", "threads", "gloo", "mpi", "nccl"] = "auto"
    """What carries rows: auto takes mpi under mpirun and gloo otherwise; threads keeps all ranks in this process; nccl
    is for GPUs, where the ways that are installed are tried as at the start of a group, and timed on the device."""

    hardware: Path | None = None
    """Device file, such as profiles/hardware/cpu.toml: adds how long the bytes take at its peak rates."""

    save: Path | None = None
    """Hardware file with rates, such as profiles/hardware/cpu.toml, to write the times to, for the cost model."""

    exchange: tyro.conf.OmitArgPrefixes[ExchangeConfig] = field(default_factory=ExchangeConfig)
    meeting: tyro.conf.OmitArgPrefixes[RendezvousConfig] = field(default_factory=RendezvousConfig)

    def __post_init__(self) -> None:
        for name in ("ranks", "slots", "top_k", "rounds", "node_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, e.g. 4")
        for name in ("tokens", "hidden"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; each must be at least 1, e.g. 128")
        self.exchange.refuse_narrow(DTYPES[self.dtype])
        refused = refusal(self.exchange.exchange, "cuda" if self.transport == "nccl" else "cpu")
        if refused is not None:
            raise ValueError(f"{refused}, or transport nccl" if self.transport != "nccl" else refused)
        if self.transport == "nccl" and not torch.cuda.is_available():
            raise ValueError("transport is nccl, but torch sees no CUDA device; e.g. gloo")
        if self.transport == "nccl":
            ways(self.exchange)

    def configs(self) -> list[ExchangeConfig]:
        """What is measured of each size: what is left open is tried both ways, but for nodes when there is one."""
        wanted = self.exchange
        modes = ("exact", "bounded") if wanted.exchange == "auto" else (wanted.exchange,)
        nodes = ("off", "on") if wanted.hierarchical == "auto" and self.node_size else (wanted.hierarchical,)
        return [
            choose(replace(wanted, exchange=mode), exchange=mode, hierarchical="off" if node == "auto" else node)
            for mode in modes
            for node in nodes
        ]


def run(flags: ExchangeFlags, start: Start) -> int:
    """Measure on all ranks and print on rank 0; returns 0. Raises Refusal for what cannot be measured."""
    with refusals():
        world = start.child.world if start.child else detect(os.environ)
        check_ranks(world, flags.ranks)
        if world.size == 1:
            usual = torch.cuda.device_count() if flags.transport == "nccl" else DEFAULT_RANKS
            world = own_world(0, flags.ranks or usual)
        topology = Topology(num_ranks=world.size, node_size=flags.node_size or world.size)
        hardware = read_hardware(flags.hardware) if flags.hardware else None
        check_hardware(hardware, topology)
        if flags.save:
            check_exchange_target(flags.save)
        name = transport_name(flags, world)
    torch.set_num_threads(1)
    if not world.is_primary:
        hush(world.rank)
    if name == "nccl":
        return run_on_gpus(flags, start, world, topology)
    if name == "threads":
        lines = run_ranks(world.size, lambda transport: measure_all(transport, flags, topology))[0]
    else:
        with transport_of(name, flags, start, world) as transport:
            lines = measure_all(transport, flags, topology)
    if world.is_primary:
        tell(lines, flags, topology, name, hardware)
    return DONE


def run_on_gpus(flags: ExchangeFlags, start: Start, world: World, topology: Topology) -> int:
    """A race on every rank's GPU, told on rank 0; returns 0."""
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    with transport_of("nccl", flags, start, world, device=device) as transport:
        races = race(
            transport, loads(flags, world.size), flags.exchange, topology=topology, device=device, ops="triton"
        )
    if world.is_primary:
        settings = {"ranks": world.size, "transport": "nccl", "slots": flags.slots, "dtype": flags.dtype}
        head = (machine_line(), f"commit    {commit()}", f"settings  {world.size} ranks, {flags.slots} slots a rank")
        tell_race(races, head, settings)
    return DONE


def transport_name(flags: ExchangeFlags, world: World) -> str:
    """What carries rows; ValueError for what cannot."""
    if flags.transport == "threads" and world.source != "own launcher":
        raise ValueError("transport is threads, but this process is one of several; leave it out, e.g. auto")
    return cpu_transport(flags.transport, world)


def check_hardware(hardware: Hardware | None, topology: Topology) -> None:
    """ValueError for a device that has no network, in a group that needs one."""
    if hardware is not None and topology.num_nodes > 1 and not hardware.network_bytes_per_s:
        raise ValueError(f"hardware is {hardware.name}, which has no network; leave node_size out, or the file")


@contextmanager
def transport_of(
    name: str, flags: ExchangeFlags, start: Start, world: World, *, device: torch.device | str = "cpu"
) -> Iterator[Transport]:
    """Start the other ranks if nobody did, meet them, and connect."""
    with ExitStack() as stack:
        with refusals():
            meeting, _ = meet_ranks(flags.meeting, start, world, stack, fields=load_fields(flags), endpoints=("store",))
        transport = open_transport(name, world, meeting, interface=flags.meeting.interface, device=device)
        yield stack.enter_context(closing(transport))


def load_fields(flags: ExchangeFlags) -> tuple[tuple[str, str], ...]:
    """What must be the same on every rank, or they would exchange something else."""
    names = ("tokens", "hidden", "slots", "top_k", "dtype", "node_size", "rounds", "transport", "exchange")
    return tuple((name, str(getattr(flags, name))) for name in names)


def measure_all(transport: Transport, flags: ExchangeFlags, topology: Topology) -> list[Line]:
    """A line for each size and each way, on every rank."""
    lines, tags = [], bench_tags()
    for load in loads(flags, transport.size):
        for config in flags.configs():
            config = replace(config, round_tokens=load.tokens)
            with torch.inference_mode():
                times = measure(transport, load, config=config, topology=topology, rounds=flags.rounds, tags=tags)
            lines.append(Line(load=load, config=config, times=times))
    return lines


def loads(flags: ExchangeFlags, ranks: int) -> list[Load]:
    """One for each size."""
    num_slots, dtype = flags.slots * ranks, DTYPES[flags.dtype]
    top_k = min(flags.top_k, num_slots)
    return [
        Load(tokens=tokens, hidden=hidden, num_slots=num_slots, top_k=top_k, dtype=dtype)
        for hidden in flags.hidden
        for tokens in flags.tokens
    ]


def tell(
    lines: Sequence[Line], flags: ExchangeFlags, topology: Topology, transport: str, hardware: Hardware | None
) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    for line in (
        QUESTION,
        machine_line(),
        f"commit    {commit()}",
        f"settings  {topology.num_ranks} ranks on {topology.num_nodes} nodes over {transport}, {flags.slots} slots a "
        f"rank, top-{flags.top_k}, {flags.dtype}, dispatch in {flags.exchange.dispatch_dtype}, combine by "
        f"{flags.exchange.combine} in {flags.exchange.combine_dtype}; medians of {flags.rounds} rounds, in turns, on "
        "the slowest rank",
        *([f"hardware  {hardware.name}, its peak rates"] if hardware else []),
    ):
        out.print(line, markup=False)
    print_table(out, exchange_table(lines, hardware))
    if flags.save:
        told = f"Exchange of {topology.num_ranks} ranks by: serried bench exchange, commit {commit()}"
        save_exchange(flags.save, ranks=topology.num_ranks, us_of_bytes=us_of_bytes(lines), comment=[told])
    print(json.dumps(summary(lines, flags, topology, transport, hardware)))


def summary(
    lines: Sequence[Line], flags: ExchangeFlags, topology: Topology, transport: str, hardware: Hardware | None
) -> dict[str, object]:
    """The last line."""
    return {
        "ranks": topology.num_ranks,
        "node_size": topology.node_size,
        "transport": transport,
        "slots": flags.slots,
        "top_k": flags.top_k,
        "dtype": flags.dtype,
        "combine": flags.exchange.combine,
        "dispatch_dtype": flags.exchange.dispatch_dtype,
        "combine_dtype": flags.exchange.combine_dtype,
        "rounds": flags.rounds,
        "commit": commit(),
        "target_wire_ratio": TARGET_RATIO,
        "lines": [line.summary(hardware) for line in lines],
    }
