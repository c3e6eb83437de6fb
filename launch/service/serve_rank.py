"""A rank of a group that serves: meets the others, finds the front door, and steps until that says it is over.

Signals that end a service are the front door's: ranks end when it says so, or when it is gone. Knows in which order a
rank comes to serve, and how it ends; does not know what is served, nor how the front door's process began (see
`front_process`).
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass

import zmq

from dbo import Untimed
from ep import PeerFailed, Transport
from runtime import EngineConfig
from runtime.control.door import host_of
from runtime.loop.profiling import SwitchedTimeline, SwitchedTransport
from runtime.loop.ranks import GroupFacts
from runtime.loop.worker import Worker
from runtime.ranks.service import Service
from runtime.ranks.wire import FactsLetter, FailedLetter, pack
from runtime.ranks.wire_mailbox import WireMailbox
from runtime.ranks.wire_sockets import WireKeys, call_front_door
from runtime.requests.kv_log import KvLog
from runtime.settings.settling import Settled

from ..front.front_config import FrontConfig
from ..front.front_house import GroupSettings
from ..groups.as_rank import hush
from ..groups.fields import version_fields
from ..groups.group import Start, Telling, alike, meet_ranks, settle_ranks
from ..groups.place import ENDPOINTS, GroupFlags, Place
from ..groups.refusal import refusals
from ..groups.trace import Trace
from ..groups.world import World, check_ranks, detect
from .front_papers import Papers
from .front_process import FrontProcess
from .front_start import DONE, FAILED
from .serve_config import ServeConfig

LAST_WORDS_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Where the front door is for ranks, and the keys to it; None on one node, where no stranger reaches it."""

    address: str
    keys: WireKeys | None


def serve_rank(
    config: EngineConfig, serve: ServeConfig, front: FrontConfig, flags: GroupFlags, start: Start, telling: Telling
) -> int:
    """Be this process's rank until the front door says that this is the end; returns the exit code.

    Raises Refusal for what cannot run. When a rank fails, the process ends with code 1 and one line that names it.
    """
    with refusals():
        world = start.child.world if start.child else detect(os.environ)
        check_ranks(world, config.ranks if config.ranks != 1 else None)
        world, settled = settle_ranks(config, flags, world)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with ExitStack() as stack:
        if world.is_primary:
            telling.say(world.describe())
            door = stack.enter_context(FrontProcess())
        else:
            hush(world.rank)
            door = None
        with refusals():
            meeting, ranks = meet_ranks(flags.meeting, start, world, stack, fields=alike(settled), endpoints=ENDPOINTS)
        keys = WireKeys.of(meeting.key) if world.num_nodes > 1 else None
        host = host_of(flags.meeting.interface) if keys is not None else ""
        papers = _papers(settled, serve, front, host=host, key=meeting.key)
        [address, *_] = meeting.gather(door.open(papers) if door else "", timeout_s=flags.meeting.start_timeout)
        place = Place(settled, flags, world, meeting, stack, child=start.child, trace=LiveTrace())
        code = _step(place, Wire(address=address, keys=keys), world, telling, door)
        place.pulse.close()
        place.transport.close()  # the others wait for that before they end, and this one waits for their end
        for rank, how in (ranks.wait() if ranks else {}).items():
            telling.say(f"rank {rank} {how}")
            code = FAILED
        return code or (door.wait() if door else code)


def _step(place: Place, wire: Wire, world: World, telling: Telling, door: FrontProcess | None) -> int:
    """Serve requests to the end; returns the exit code."""
    trace, log = place.trace, KvLog()
    assert isinstance(trace, LiveTrace), "a service is traced while it runs"
    with zmq.Context() as context:
        mailbox = WireMailbox(call_front_door(context, wire.address, wire.keys, rank=world.rank))
        place.listen(lambda cause: last_words(wire, cause))

        def tell_facts(facts: GroupFacts) -> None:
            mailbox.say(_facts_letter(place, facts))

        def attach(worker: Worker) -> None:
            mailbox.attach(Service(worker, log=log, timeline=trace.switch, say=mailbox.say))
            if door is not None:
                door.trust_wire()

        place.serve(
            mailbox,
            on_facts=tell_facts if world.is_primary else None,
            on_plan=telling.on_plan if world.is_primary else None,
            on_progress=telling.on_progress if world.is_primary else None,
            on_worker=attach,
            kv_log=log,
        )
        mailbox.close()
    if mailbox.is_orphaned:
        telling.say(f"rank {world.rank} ends: the front door is gone")
        return FAILED
    return DONE


def last_words(wire: Wire, cause: BaseException) -> None:
    """Tell the front door who failed, from whatever thread, over a socket of this call's own; waits a moment."""
    if not isinstance(cause, PeerFailed):
        return
    words = cause.cause if cause.step is None else f"{cause.cause} (step {cause.step})"
    with zmq.Context() as context:
        socket = call_front_door(context, wire.address, wire.keys, rank=None)
        socket.send(pack(FailedLetter(cause.culprit, words)), zmq.NOBLOCK)
        socket.close(LAST_WORDS_MS)


class LiveTrace(Trace):
    """Of a rank that is traced when somebody asks, for some steps."""

    def __init__(self) -> None:
        super().__init__(None)
        self.switch = SwitchedTimeline()

    def timeline(self, rank: int) -> Untimed:  # noqa: ARG002  # there is one rank in this process
        """See `Trace`."""
        return self.switch

    def transport(self, transport: Transport) -> Transport:
        """See `Trace`."""
        return SwitchedTransport(transport, self.switch)


def _papers(settled: Settled, serve: ServeConfig, front: FrontConfig, *, host: str, key: bytes) -> Papers:
    config = settled.config
    group = GroupSettings(
        size=config.ranks,
        served_model_name=serve.served_model_name or os.path.basename(os.path.abspath(config.model)),
        seed=config.seed,
        caches_prefixes=config.scheduler.enable_prefix_caching,
        routing=config.routing,
        limits=front,
        kv=config.kv,
        slow_reader_s=serve.limits.slow_reader_timeout_s,
    )
    return Papers(group=group, serve=serve, host=host, key=key.hex())


def _facts_letter(place: Place, facts: GroupFacts) -> FactsLetter:
    """What rank 0 tells the front door of the model and of its start."""
    settled, versions = place.settled, dict(version_fields())
    dtype = str(settled.dtype).removeprefix("torch.")
    return FactsLetter(
        model_path=os.path.abspath(settled.config.model),
        model_type=facts.model.model_type,
        vocab_size=facts.model.vocab_size,
        eos_token_ids=facts.model.eos_token_ids,
        bos_token_id=facts.model.bos_token_id,
        model_dtype=dtype,
        kv_cache_dtype="fp8" if settled.config.cache.is_fp8 else dtype,
        max_num_seqs=settled.config.scheduler.max_num_seqs,
        config_hash=f"{settled.config.digest((settled.model, settled.from_files)):016x}",
        startup_s=dict(place.times.seconds),
        notes=facts.notes,
        version=versions["the version of serried"],
        commit=versions["the source of serried"],
    )
