"""The engine of a command, whatever it was started with: alone, as threads, or as one rank of a group of processes.

    alone, or --transport threads     ranks take turns in this process
    --ranks N                         this process is rank 0 and starts the others with its own words
    torchrun, mpirun, srun            this process is one of theirs

Rank 0 gets the engine and carries the command out; the other ranks serve it until it ends. Knows how the parts come
together and in which order; each part is somebody else's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runtime import Engine, EngineConfig
from runtime.assembly import OnPlan
from runtime.loop.instruments import Instruments
from runtime.ranks.front import accept_ranks, call_front
from runtime.ranks.mailbox import LinkMailbox
from runtime.ranks.process_ranks import ProcessRanks
from runtime.settings.settling import Settled, settle
from runtime.thread_ranks import ThreadRanks
from runtime.weights.progress import OnProgress

from .as_rank import Child, hush, on_parent_death
from .display import Display
from .fields import config_fields, model_fields, version_fields
from .meeting import Meeting
from .place import ENDPOINTS, GroupFlags, Place, transport_of
from .rendezvous import RendezvousConfig, meet, open_gate
from .spawn import OwnRanks, start_ranks
from .trace import Trace
from .world import World, check_ranks, detect, own_world


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
    """What the user is told while the engine is built, and then of the ranks (`say`), on rank 0."""

    say: Callable[[str], None]
    on_plan: OnPlan
    on_progress: OnProgress


@contextmanager
def engine_of(
    config: EngineConfig,
    flags: GroupFlags,
    start: Start,
    telling: Telling,
    *,
    instruments: Instruments | None = None,
) -> Iterator[Engine | None]:
    """The engine, ready; or None in a process that was a rank of a group, whose work is done by then.

    instruments: what a benchmark wants measured; None: nothing.

    Raises ValueError for what cannot run, RanksDiffer, PeerFailed for a rank that does not come. When a rank fails, the
    process ends with code 1 and one line that names it.
    """
    world = start.child.world if start.child else detect(os.environ)
    check_ranks(world, config.ranks if config.ranks != 1 else None)
    if world.size == 1 and (config.ranks == 1 or flags.transport == "threads"):
        yield from _threads(config, flags, telling, instruments)
        return
    world, settled = settle_ranks(config, flags, world)
    if world.is_primary:
        telling.say(world.describe())
    else:
        hush(world.rank)
    with ExitStack() as stack:
        meeting, ranks = meet_ranks(
            flags.meeting, start, world, stack, fields=alike(settled), endpoints=(*ENDPOINTS, "front")
        )
        place = Place(settled, flags, world, meeting, stack, child=start.child, instruments=instruments)
        if world.is_primary:
            yield from _front(place, meeting, telling)
            place.transport.close()  # the others wait for that before they end, and this one waits for their end
            for rank, how in (ranks.wait() if ranks else {}).items():
                telling.say(f"rank {rank} {how}")
        else:
            address = meeting.endpoint("front")
            assert isinstance(address, tuple), "only rank 0 listens"
            link = call_front(address, rank=world.rank, size=world.size, key=meeting.key)
            place.serve(LinkMailbox(link), on_facts=None, on_plan=None, on_progress=None)
            place.pulse.close()
            yield None


def settle_ranks(config: EngineConfig, flags: GroupFlags, world: World) -> tuple[World, Settled]:
    """Of a group of processes: this one's place, and its settings; one that nobody launched is rank 0 of our own.

    Raises ValueError for what cannot run: before anybody is met, for what is refused here is refused alike everywhere.
    """
    if world.source == "torchrun":
        on_parent_death(signal.SIGKILL)  # its agent does not watch over what it leaves when it is killed itself
    if world.size == 1:
        world = own_world(0, config.ranks)
    settled = settle(replace(config, ranks=world.size), local_size=world.even_local_size, ranks_here=world.local_size)
    transport_of(flags, world, settled)
    if settled.device.type == "cuda":
        settled = replace(settled, device=torch.device("cuda", world.local_rank))
    torch.set_num_threads(1)
    return world, settled


def alike(settled: Settled) -> tuple[tuple[str, str], ...]:
    """What all ranks must have alike: see `fields`."""
    return (*model_fields(Path(settled.config.model)), *config_fields(settled.config))


def _threads(
    config: EngineConfig, flags: GroupFlags, telling: Telling, instruments: Instruments | None
) -> Iterator[Engine]:
    """All ranks here."""
    trace = Trace(flags.trace)
    display = Display(f"threads-{os.getpid()}", chosen=flags.run_dir)
    ranks = ThreadRanks(
        config,
        drafter=None,
        on_plan=telling.on_plan,
        on_progress=telling.on_progress,
        trace=trace.transport,
        timeline=trace.timeline,
        instruments=instruments,
        show=lambda rank: display.show(rank, config.ranks),
    )
    for line in display.warnings:
        telling.say(line)
    try:
        with Engine(config, ranks=ranks, on_notice=telling.say) as engine:
            yield engine
    finally:
        display.close()
    for line in trace.finish():
        telling.say(line)


def meet_ranks(
    config: RendezvousConfig,
    start: Start,
    world: World,
    stack: ExitStack,
    *,
    fields: Sequence[tuple[str, str]],
    endpoints: Sequence[str],
) -> tuple[Meeting, OwnRanks | None]:
    """All ranks of the group, met and found alike in `fields` and version; started first where that is ours to do."""
    gate = ranks = None
    if start.child is None and world.source == "own launcher":
        gate = stack.enter_context(open_gate(world, config, by_file=False))
        ranks = stack.enter_context(start_ranks(start.words, size=world.size, invitation=gate.invitation))
    meeting = meet(
        world,
        config,
        fields=(*version_fields(), *fields),
        endpoints=endpoints,
        gate=gate,
        invitation=start.child.invitation if start.child else None,
        check=ranks.check if ranks else None,
    )
    return stack.enter_context(meeting), ranks


def _front(place: Place, meeting: Meeting, telling: Telling) -> Iterator[Engine]:
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
    with Engine(place.settled.config, ranks=ranks, on_notice=telling.say) as engine:
        try:
            yield engine
        finally:
            place.finish()
    for line in place.traced:
        telling.say(line)
    place.pulse.close()
