"""The engine of a command, whatever it was started with: alone, as threads, or as one rank of a group of processes.

    alone, or --transport threads     ranks take turns in this process
    --ranks N                         this process is rank 0 and starts the others with its own words
    torchrun, mpirun, srun            this process is one of theirs

Rank 0 gets the engine and carries the command out; the other ranks serve it until it ends. Knows how the parts come
together and in which order; each part is somebody else's.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from ep import PeerFailed, Transport
from ep.conformance import check_transport
from ep.torch_dist import open_store, open_torch_dist
from runtime import Engine, EngineConfig
from runtime.assembly import OnPlan, Seat, assemble
from runtime.control import Control
from runtime.front import accept_ranks, call_front
from runtime.mailbox import LinkMailbox, Mailbox
from runtime.node_share import NodePeers
from runtime.process_ranks import ProcessRanks
from runtime.progress import OnProgress
from runtime.pulse import Pulse
from runtime.rank_loop import RankInbox, run_rank, speaker
from runtime.ranks import GroupFacts
from runtime.recorder import Watched
from runtime.settling import Settled, settle
from runtime.stars import open_control
from runtime.startup import StartupTimes, process_began
from runtime.verdict import Verdict
from runtime.votes import Vote

from .as_rank import Child, hush
from .fields import config_fields, model_fields, version_fields
from .meeting import Meeting
from .rendezvous import RendezvousConfig, meet, open_gate
from .spawn import OwnRanks, start_ranks
from .world import World, check_ranks, detect, own_world

TransportName = Literal["auto", "threads", "gloo", "mpi", "nccl"]

ENDPOINTS = ("control", "pulse", "store", "front")
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

    meeting: tyro.conf.OmitArgPrefixes[RendezvousConfig] = field(default_factory=RendezvousConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How this process came to be: the command and its words, and the papers of a child that rank 0 started."""

    words: Sequence[str]
    child: Child | None = None


def is_primary(start: Start) -> bool:
    """Whether this process is the one that speaks and reads what the user gives; ValueError for a muddled launcher."""
    return start.child is None and detect(os.environ).is_primary


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What the user is told while the engine is built, on rank 0."""

    say: Callable[[str], None]
    on_plan: OnPlan
    on_progress: OnProgress


@contextmanager
def engine_of(config: EngineConfig, flags: GroupFlags, start: Start, telling: Telling) -> Iterator[Engine | None]:
    """The engine, ready; or None in a process that was a rank of a group, whose work is done by then.

    Raises ValueError for what cannot run, RanksDiffer, PeerFailed for a rank that does not come. When a rank fails, the
    process ends with code 1 and one line that names it.
    """
    world = start.child.world if start.child else detect(os.environ)
    check_ranks(world, config.ranks if config.ranks != 1 else None)
    if world.size == 1 and (config.ranks == 1 or flags.transport == "threads"):
        with Engine(config, on_plan=telling.on_plan, on_progress=telling.on_progress) as engine:
            yield engine
        return
    if flags.transport == "threads":
        raise ValueError("transport is threads, but this process is one of several; leave it out, e.g. auto")
    if world.size == 1:
        world = own_world(0, config.ranks)
    config = replace(config, ranks=world.size)
    settled = settle(config)  # before anybody is met: what is refused here is refused alike everywhere
    torch.set_num_threads(1)
    if world.is_primary:
        telling.say(world.describe())
    else:
        hush(world.rank)
    with ExitStack() as stack:
        meeting, ranks = _meet(settled, flags, start, world, stack)
        place = _Place(settled, flags, world, meeting, stack, child=start.child)
        if world.is_primary:
            yield from _front(place, meeting, telling)
            for rank, how in (ranks.wait() if ranks else {}).items():
                telling.say(f"rank {rank} {how}")
        else:
            address = meeting.endpoint("front")
            assert isinstance(address, tuple), "only rank 0 listens"
            link = call_front(address, rank=world.rank, size=world.size, key=meeting.key)
            place.serve(LinkMailbox(link), on_facts=None, on_plan=None, on_progress=None)
            place.pulse.close()
            yield None


def _meet(
    settled: Settled, flags: GroupFlags, start: Start, world: World, stack: ExitStack
) -> tuple[Meeting, OwnRanks | None]:
    """All ranks of the group, met and found alike; started first where that is ours to do."""
    gate = ranks = None
    if start.child is None and world.source == "own launcher":
        gate = stack.enter_context(open_gate(world, flags.meeting, by_file=False))
        ranks = stack.enter_context(start_ranks(start.words, size=world.size, invitation=gate.invitation))
    config = settled.config
    meeting = meet(
        world,
        flags.meeting,
        fields=(*version_fields(), *model_fields(Path(config.model)), *config_fields(config)),
        endpoints=ENDPOINTS,
        gate=gate,
        invitation=start.child.invitation if start.child else None,
        check=ranks.check if ranks else None,
    )
    return stack.enter_context(meeting), ranks


def _front(place: _Place, meeting: Meeting, telling: Telling) -> Iterator[Engine]:
    """Rank 0: its own rank in a thread, the engine here."""
    listener = meeting.endpoint("front")
    assert not isinstance(listener, tuple), "rank 0 listens"
    links = accept_ranks(listener, size=place.world.size, key=meeting.key)
    ranks = ProcessRanks(
        links,
        run_own=lambda mailbox, built: place.serve(
            mailbox, on_facts=built, on_plan=telling.on_plan, on_progress=telling.on_progress
        ),
        on_start=place.listen,
    )
    with Engine(place.settled.config, ranks=ranks) as engine:
        try:
            yield engine
        finally:
            place.finish()
    place.pulse.close()


class _Place:
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
    ) -> None:
        self.settled = settled
        self.world = world
        self.times = StartupTimes(began=process_began())
        self.times.mark("import")
        self._verdict: Verdict | None = None
        self._lose: Callable[[BaseException], None] | None = None
        self._finished = threading.Event()
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
        self.transport = stack.enter_context(closing(_open_transport(world, flags, settled, meeting)))

    def serve(
        self,
        mailbox: Mailbox,
        *,
        on_facts: Callable[[GroupFacts], None] | None,
        on_plan: OnPlan | None,
        on_progress: OnProgress | None,
    ) -> None:
        """Build this rank and run it to its end. What it raises ends the group, with this rank's name."""
        try:
            check_transport(self.transport)
            recorder, inbox = Watched(self.pulse.board), RankInbox(mailbox)
            seat = Seat(
                transport=self.transport, control=self.control, recorder=recorder, emit=speaker(mailbox), inbox=inbox
            )
            self.times.mark("meet")
            parts = assemble(
                self.settled,
                seats=[seat],
                drafter=None,
                on_plan=on_plan,
                on_progress=on_progress,
                peers=node_peers(self.world, self.control),
            )
            self.times.mark("load")
            if on_facts is not None:
                told = (*(parts.load.lines() if parts.load else ()), self.times.line())
                on_facts(GroupFacts(model=parts.model, plan=parts.plan, capacities=(), notes=(*parts.notes, *told)))
            self.pulse.warm()
            self.pulse.ready()
            run_rank(parts.workers[0], mailbox, inbox, recorder, notes=parts.notes)
        except BaseException as error:  # told to the group, which ends with it
            self.pulse.fail(error)

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
        if self._lose is not None:
            self._lose(PeerFailed(verdict.culprit, verdict.cause, rank=self.world.rank, step=max(verdict.step, 0)))
            self._finished.wait(LAST_WORDS_S)


def node_peers(world: World, control: Control) -> NodePeers:
    """The ranks of this node, meeting over the control plane: every node makes the same calls, with numbers that no
    step has."""
    first = world.rank - world.local_rank
    ranks = tuple(range(first, first + world.local_size))
    numbers = itertools.count(-1, -1)
    width = len(Vote._fields)

    def gather(row: Sequence[int]) -> list[list[int]]:
        padded = [*row, *[0] * (width - len(row))]
        rows = control.gather(padded, sequence=next(numbers)).wait()
        return [rows[rank][: len(row)] for rank in ranks]

    return NodePeers(ranks=ranks, rank=world.rank, gather=gather)


def _open_transport(world: World, flags: GroupFlags, settled: Settled, meeting: Meeting) -> Transport:
    name = flags.transport
    if name == "auto":
        on_gpu = settled.device.type == "cuda"
        name = "nccl" if on_gpu else "mpi" if world.source == "mpirun" else "gloo"
    if name == "mpi":
        from .over_mpi import open_transport  # optional: it needs mpi4py

        return open_transport(world)
    here = meeting.endpoint("store")
    interface = flags.meeting.interface
    if isinstance(here, tuple):
        store = open_store(*here, rank=world.rank, size=world.size, interface=interface)
    else:
        store = open_store("", None, rank=0, size=world.size, interface=interface, listener=here)
    return open_torch_dist(
        rank=world.rank, size=world.size, backend=name, store=store, interface=interface, device=settled.device
    )
