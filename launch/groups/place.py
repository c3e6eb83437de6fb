"""One rank's place in a group of processes: its pulse, its control plane, its transport, and how it serves from there.

Knows in which order a rank comes to life and how it ends; does not know commands (see `group`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

from ep import PeerFailed, Transport
from ep.conformance import check_transport
from ep.torch_dist import num_communicators, open_store, open_torch_dist
from runtime.assembly import OnPlan, Seat, assemble
from runtime.control.control import Control
from runtime.control.stars import open_control
from runtime.failure.flight import run_name
from runtime.failure.gpu_health import GpuHealth, load_library
from runtime.failure.pulse import Pulse
from runtime.failure.recorder import Watched
from runtime.failure.verdict import Verdict
from runtime.loop.instruments import Instruments
from runtime.loop.ranks import GroupFacts
from runtime.loop.voice import no_excuse
from runtime.loop.worker import Worker
from runtime.ranks.mailbox import Mailbox
from runtime.ranks.rank_loop import RankInbox, notifier, run_rank, speaker
from runtime.requests.kv_log import KvLog
from runtime.requests.outputs import Note
from runtime.scheduling.votes import Vote
from runtime.settings.settling import Settled
from runtime.weights.memory_check import memory_lines
from runtime.weights.node_share import NodePeers
from runtime.weights.progress import OnProgress
from runtime.weights.startup import StartupTimes, process_began

from .as_rank import Child
from .display import Display
from .meeting import Meeting
from .rendezvous import RendezvousConfig
from .trace import Trace, check_path
from .world import World

TransportName = Literal["auto", "threads", "gloo", "mpi", "nccl"]

ENDPOINTS = ("control", "pulse", "store")
LAST_WORDS_S = 0.8
"""How long the command may take to say what becomes of its requests when the group has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFlags:
    """How ranks run and reach each other."""

    transport: TransportName = "auto"
    """What carries rows between ranks: gloo (CPU), nccl (GPUs), mpi (under mpirun), or threads of this one process.
    auto: mpi under mpirun on CPUs, else gloo on CPUs and nccl on GPUs; a single rank needs none."""

    flight_dir: Path | None = None
    """Folder for flight records, which surviving ranks write when one fails; unset: none are written."""

    trace: Path | None = None
    """File for a trace of the latest steps: when each track computed, waited and had rows under way, for
    ui.perfetto.dev. Rank 1 writes one with .rank1 before its ending, and so on; unset: none is written."""

    run_dir: Path | None = None
    """Folder where ranks show themselves to `serried top`; unset: one of this user's own, in memory where there is
    such a folder."""

    meeting: tyro.conf.OmitArgPrefixes[RendezvousConfig] = field(default_factory=RendezvousConfig)

    def __post_init__(self) -> None:
        check_path(self.trace)
        if self.flight_dir is not None and self.flight_dir.exists() and not self.flight_dir.is_dir():
            raise ValueError(f"flight_dir is {str(self.flight_dir)!r}, a file; it must be a folder, or not there yet")


def transport_of(flags: GroupFlags, world: World, settled: Settled) -> str:
    """What carries rows in this group. Raises ValueError for what cannot: its field, value, and what would do."""
    on_gpu = settled.device.type == "cuda"
    if flags.transport == "threads":
        raise ValueError("transport is threads, but this process is one of several; leave it out, e.g. auto")
    name = "nccl" if flags.transport == "auto" and on_gpu else cpu_transport(flags.transport, world)
    if (name == "nccl") != on_gpu:
        fit = "nccl" if on_gpu else "gloo or mpi"
        raise ValueError(f"transport is {name}, but device is {settled.device.type}; rows there travel over {fit}")
    return name


def cpu_transport(name: str, world: World) -> str:
    """What carries rows between ranks on CPUs; ValueError for MPI without a launcher that speaks it."""
    if name == "auto":
        return "mpi" if world.source == "mpirun" else "gloo"
    if name == "mpi" and world.source not in ("mpirun", "srun"):
        raise ValueError(f"transport is mpi, but what started this is: {world.describe()}; use mpirun, or gloo")
    return name


class Place:
    """One rank's place in the group: its pulse, its control plane and its transport."""

    def __init__(
        self,
        settled: Settled,
        flags: GroupFlags,
        world: World,
        meeting: Meeting,
        stack: ExitStack,
        *,
        child: Child | None,
        trace: Trace | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        """trace: one that is not written at the end."""
        self.settled = settled
        self.world = world
        self.instruments = instruments
        self.trace = trace or Trace(flags.trace)
        self.traced: tuple[str, ...] = ()
        self.times = StartupTimes(began=process_began())
        self.times.mark("import")
        self._verdict: Verdict | None = None
        self._lose: Callable[[BaseException], None] | None = None
        self._finished = threading.Event()
        self._display = Display(run_name(meeting.key), chosen=flags.run_dir)
        self._show = self._display.show(world.rank, world.size)
        self.pulse = Pulse.start(
            rank=world.rank,
            size=world.size,
            hub=meeting.endpoint("pulse"),
            key=meeting.key,
            directory=flags.flight_dir,
            on_verdict=self._hear_verdict,
        )
        if child is not None:
            child.trust_pulse()
        self.control: Control = open_control(
            rank=world.rank,
            size=world.size,
            hub=meeting.endpoint("control"),
            key=meeting.key,
            width=len(Vote._fields),
            interface=flags.meeting.interface,
        )
        transport = open_transport(
            transport_of(flags, world, settled),
            world,
            meeting,
            interface=flags.meeting.interface,
            device=settled.device,
            comm_sms=settled.config.left_sms,
        )
        self.transport = stack.enter_context(closing(transport))
        self._excuses = no_excuse
        if settled.device.type == "cuda":
            uuid = torch.cuda.get_device_properties(settled.device).uuid
            self._excuses = stack.enter_context(GpuHealth(f"GPU-{uuid}", load_library())).reasons

    def serve(
        self,
        mailbox: Mailbox,
        *,
        on_facts: Callable[[GroupFacts], None] | None,
        on_plan: OnPlan | None,
        on_progress: OnProgress | None,
        on_worker: Callable[[Worker], None] | None = None,
        kv_log: KvLog | None = None,
    ) -> None:
        """Build this rank and run it to its end. What it raises ends the group, with this rank's name."""
        try:
            check_transport(self.transport)
            recorder, inbox = Watched(self.pulse.board), RankInbox(mailbox)
            seat = Seat(
                transport=self.trace.transport(self.transport),
                control=self.control,
                recorder=recorder,
                emit=speaker(mailbox),
                notify=partial(self._notify, notifier(mailbox)),
                inbox=inbox,
                timeline=self.trace.timeline(self.world.rank),
                excuses=self._excuses,
                kv_log=kv_log,
                show=self._show,
                communicators=partial(num_communicators, self.transport),
            )
            self.times.mark("meet")
            parts = assemble(
                self.settled,
                seats=[seat],
                drafter=None,
                on_plan=on_plan,
                on_progress=on_progress,
                peers=node_peers(self.world, self.control),
                instruments=self.instruments,
            )
            parts.workers[0].decoder.self_test()
            parts.workers[0].launcher.runner.prepare()
            self.times.mark("load")
            if on_facts is not None:
                told = (*(parts.load.lines() if parts.load else ()), self.times.line())
                told = (*told, *memory_lines(parts.plan, self.settled.device), *self._display.warnings)
                on_facts(GroupFacts(model=parts.model, plan=parts.plan, capacities=(), notes=(*parts.notes, *told)))
            if on_worker is not None:
                on_worker(parts.workers[0])
            self.pulse.warm()
            self.pulse.ready()
            run_rank(parts.workers[0], mailbox, inbox, recorder)
            self.traced = tuple(self.trace.finish())
            self._display.close()
        except BaseException as error:  # told to the group, which ends with it
            self.pulse.fail(error)

    def _notify(self, tell: Callable[[Note], None], note: Note) -> None:
        self._show.noted(note.text)
        tell(note)

    def listen(self, lose: Callable[[BaseException], None]) -> None:
        """Whom to tell, on rank 0, that the group has failed."""
        self._lose = lose
        if self._verdict is not None:
            self._hear_verdict(self._verdict)

    def finish(self) -> None:
        """The command has ended. After a failure it waits here for the pulse, which ends the process with one line."""
        self._finished.set()
        if self._verdict is not None:
            threading.Event().wait()

    def _hear_verdict(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._display.fail(verdict)
        if self._lose is not None:
            self._lose(PeerFailed(verdict.culprit, verdict.cause, rank=self.world.rank, step=max(verdict.step, 0)))
            self._finished.wait(LAST_WORDS_S)


def node_peers(world: World, control: Control) -> NodePeers:
    """The ranks of this node, meeting over the control plane: every node makes the same calls, with numbers that no
    step has."""
    numbers = itertools.count(-1, -1)
    width = len(Vote._fields)

    def gather_all(row: Sequence[int]) -> list[list[int]]:
        padded = [*row, *[0] * (width - len(row))]
        return control.gather(padded, sequence=next(numbers)).wait()

    here = node_id()  # launchers number ranks of a node in ways of their own; the kernel knows
    ranks = tuple(rank for rank, row in enumerate(gather_all([here])) if row[0] == here)

    def gather(row: Sequence[int]) -> list[list[int]]:
        rows = gather_all(row)
        return [rows[rank][: len(row)] for rank in ranks]

    return NodePeers(ranks=ranks, rank=world.rank, gather=gather)


def node_id() -> int:
    """63 bits, equal in processes that can see each other: one kernel, one process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    text = boot + os.readlink("/proc/self/ns/pid")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def open_transport(
    name: str,
    world: World,
    meeting: Meeting,
    *,
    interface: str,
    device: torch.device | str = "cpu",
    comm_sms: int = 0,
) -> Transport:
    """This rank's end of what carries rows: gloo, nccl or mpi. The meeting has an endpoint `store`."""
    if name == "mpi":
        from .over_mpi import open_transport as open_mpi  # optional: it needs mpi4py

        return open_mpi(world)
    here = meeting.endpoint("store")
    if isinstance(here, tuple):
        store = open_store(*here, rank=world.rank, size=world.size, interface=interface)
    else:
        store = open_store("", None, rank=0, size=world.size, interface=interface, listener=here)
    return open_torch_dist(
        rank=world.rank,
        size=world.size,
        backend=name,
        store=store,
        interface=interface,
        device=device,
        comm_sms=comm_sms,
    )
