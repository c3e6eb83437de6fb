"""From a configuration to ranks that can step: read the model, plan the bytes, load the weights, build the parts.

The order is fixed: everything that can be refused is refused before a weight is read, the plan of bytes is announced
before anything is allocated. Knows every part by its constructor; does not know how a step works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attention_mla import LatentCache
from dbo import UNTIMED, OverlapState, Untimed
from ep import Transport, exchange_ops
from ep.lanes import LANES, LanedTransport
from ep.ops import import_kernels
from eplb import ExpertLoad

from .control.control import Control
from .failure.recorder import Recorder, StampedTransport
from .failure.straggler import StragglerState
from .forward.batch import RequestTable
from .forward.decoder import Decoder, Through, as_they_are
from .forward.device_time import device_time_of
from .forward.experts import Experts
from .forward.part_times import NO_PARTS, NoParts
from .forward.ranges import RANGES
from .graphs.switch import Switch
from .graphs.sync_guard import guard_of
from .loading import load_ranks, load_with, weight_source
from .loop.instruments import Instruments, timed_recorder, timed_sampler
from .loop.ranks import Inbox
from .loop.rebalance import build_rebalancer, widest
from .loop.routing_record import open_recorder
from .loop.showing import NOT_SHOWN, NotShown
from .loop.voice import Excuses, no_excuse
from .loop.worker import Worker
from .model.model_config import ModelConfig
from .requests.kv_log import KvLog
from .requests.outputs import News, Note
from .requests.pages import PagePool
from .requests.refusals import check_drafts
from .requests.request import Request
from .sampling.sampler_ops import sampler_ops
from .scheduling.cadence import StepBudget
from .scheduling.heartbeat import HeartbeatState
from .scheduling.scheduler import Drafter, Scheduler
from .settings.exchange_build import OpenBackEnd, build_exchange, with_back_ends
from .settings.kv_connectors import build_hand_over
from .settings.runner_choice import build_runner
from .settings.settling import Settled
from .settings.step_costs import overlap_state, step_budget
from .weights.checkpoint import TensorSource
from .weights.memory import MemoryPlan
from .weights.node_share import NodePeers
from .weights.progress import OnProgress
from .weights.startup import LoadReport
from .weights.weights import DecoderWeights

OnPlan = Callable[[MemoryPlan], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    model: ModelConfig
    plan: MemoryPlan
    workers: tuple[Worker, ...]
    notes: tuple[str, ...]
    """What the user should know of the model's files, a line each."""
    load: LoadReport | None
    """What was read from files, where ranks are processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What ties one rank to the others, and to whoever listens. `timeline` is told what its tracks do; `excuses`
    say why its device may be slow; `show` is told every step, `kv_log` what its prefix cache holds. `communicators`:
    how many the transport has opened so far."""

    transport: Transport
    control: Control
    recorder: Recorder
    emit: Callable[[Sequence[News]], None]
    notify: Callable[[Note], None]
    inbox: Inbox
    timeline: Untimed = UNTIMED
    excuses: Excuses = no_excuse
    kv_log: KvLog | None = None
    show: NotShown = NOT_SHOWN
    communicators: Callable[[], int] = lambda: 1


def assemble(
    settled: Settled,
    *,
    seats: Sequence[Seat],
    drafter: Drafter | None,
    on_plan: OnPlan | None,
    on_progress: OnProgress | None,
    peers: NodePeers | None = None,
    instruments: Instruments | None = None,
) -> Parts:
    """Build one worker for each seat. What all ranks hold alike is loaded once and shared by the seats of a process.

    peers         the processes of this node, for the single seat of one of them: they read and keep together what they
                  share
    instruments   what a benchmark wants measured; None: nothing
    """
    overlap = overlap_state(settled)
    if settled.config.cpu_threads is not None:
        torch.set_num_threads(settled.config.cpu_threads)
    if on_plan is not None:
        on_plan(settled.plan)
    source = weight_source(settled, turn=(peers.place, peers.size) if peers is not None else (0, 1))
    report = None
    if peers is not None:
        loaded = load_with(peers, settled, source, on_progress)
        weights, report = [loaded.weights], loaded.report
    else:
        weights = load_ranks(settled, source, [seat.transport.rank for seat in seats], on_progress)
    budget = step_budget(settled)
    if drafter is not None:
        drafter = partial(_guarded, drafter, settled.model.vocab_size)
    told: list[str] = []
    workers = tuple(
        _worker(
            settled,
            held,
            seat,
            budget=budget,
            overlap=overlap,
            drafter=drafter,
            source=source,
            ranks_here=len(seats),
            instruments=instruments or Instruments(),
            tell=told.append,
        )
        for seat, held in zip(seats, weights, strict=True)
    )
    if settled.config.ops == "numba" and (compiled := import_kernels("ep.cpu.disk", None).note()) is not None:
        told.append(compiled)
    return Parts(
        model=settled.model,
        plan=settled.plan,
        workers=workers,
        notes=(*settled.model.warnings, *source.notes, *settled.notes, *told),
        load=report,
    )


def _guarded(drafter: Drafter, vocab_size: int, request: Request) -> list[int]:
    return check_drafts(drafter(request), vocab_size)


def _worker(
    settled: Settled,
    weights: DecoderWeights,
    seat: Seat,
    *,
    budget: StepBudget | None,
    overlap: OverlapState,
    drafter: Drafter | None,
    source: TensorSource,
    ranks_here: int,
    instruments: Instruments,
    tell: Callable[[str], None],
) -> Worker:
    config, model, plan = settled.config, settled.model, settled.plan
    log = seat.kv_log
    pool = PagePool(plan.num_pages, config.cache.block_size, on_evict=log.removed if log is not None else None)
    prefix = instruments.prefix(pool, enabled=config.scheduler.enable_prefix_caching, log=log)
    timer = instruments.timer()
    recorder = timed_recorder(seat.recorder, timer)
    max_model_len = config.scheduler.max_model_len
    assert max_model_len is not None, "max_model_len is settled before workers are built"
    lanes = LANES[settled.device.type](settled.device)
    recorder = RANGES[settled.device.type](recorder)
    transport = StampedTransport(LanedTransport(seat.transport, lanes), recorder)
    switch = Switch()
    device_time = device_time_of(settled.device, model.moe_layers)
    carried = switch.carry(device_time.carry(transport))
    beside = switch.carry_lanes(device_time.carry_lanes(lanes))
    settled, back_end = with_back_ends(settled, transport, beside, ranks_here=ranks_here)
    decoder = build_decoder(
        settled, weights, carried, through=switch.through, timer=timer, back_end=back_end, tell=tell
    )
    instruments.prepare(decoder.cache)
    table = RequestTable(
        config.scheduler.max_num_seqs, max_model_len, page_size=config.cache.block_size, device=settled.device
    )
    guard = guard_of(settled.device, debug_sync=config.graphs.debug_sync, communicators=seat.communicators)
    hand_over = build_hand_over(settled, decoder.cache, pool, prefix, rank=seat.transport.rank)
    return Worker(
        decoder=decoder,
        scheduler=Scheduler(config.scheduler, pool, prefix, drafter=drafter, hand_over=hand_over),
        pool=pool,
        prefix=prefix,
        table=table,
        transport=transport,
        control=seat.control,
        recorder=recorder,
        state=HeartbeatState.start(config.cadence, budget=budget, overlap=overlap),
        stragglers=StragglerState(config=config.straggler),
        async_depth=config.async_depth,
        config_hash=config.digest((model, settled.from_files)),
        experts=_experts(settled, decoder, transport, source=source),
        emit=seat.emit,
        notify=seat.notify,
        inbox=seat.inbox,
        may_overflow=decoder.may_overflow,
        timeline=seat.timeline,
        excuses=seat.excuses,
        sampler=timed_sampler(sampler_ops(config.ops), timer),
        parts=timer,
        show=seat.show,
        runner=build_runner(
            settled,
            decoder,
            table,
            switch=switch,
            timeline=seat.timeline,
            ranks_here=ranks_here,
            drafts=drafter is not None,
            guard=guard,
        ),
        guard=guard,
        device_time=device_time,
    )


def _experts(settled: Settled, decoder: Decoder, transport: Transport, *, source: TensorSource) -> Experts:
    config, model = settled.config.eplb, settled.model
    num_experts = model.moe.num_experts if model.moe else 0
    load = ExpertLoad(len(model.moe_layers), num_experts, device=settled.device, window=config.eplb_window)
    rebalancer = build_rebalancer(
        config,
        model,
        settled.placements,
        banks={layer: moe.bank for layer, each in enumerate(decoder.weights.layers) if (moe := each.moe) is not None},
        tables=decoder.tables,
        load=load,
        transport=transport,
        source=source,
        node_size=settled.topology.node_size,
    )
    return Experts(
        load,
        placements=[settled.placements[layer] for layer in model.moe_layers],
        rebalancer=rebalancer,
        recording=open_recorder(config, model, ranks=transport.size, rank=transport.rank, name=settled.config.model),
    )


def build_decoder(
    settled: Settled,
    weights: DecoderWeights,
    transport: Transport,
    *,
    through: Through = as_they_are,
    timer: NoParts = NO_PARTS,
    back_end: OpenBackEnd | None = None,
    tell: Callable[[str], object] = str,
) -> Decoder:
    """One rank's model, its cache allocated. back_end: as for an `Exchange`. `tell` hears how the exchange was chosen
    where ranks try several."""
    config, model, plan = settled.config, settled.model, settled.plan
    cache = LatentCache(model.num_layers, plan.num_pages, config.cache.block_size, settled.cache_row, settled.device)
    exchange, tables, rank = None, {}, transport.rank
    if model.moe is not None and settled.placements:
        width = widest(settled.placements, model.moe.num_experts)
        tables = {
            layer: placement.table(settled.device, rank=rank, node_size=settled.topology.node_size, width=width)
            for layer, placement in settled.placements.items()
        }
        exchange = build_exchange(
            settled, transport, timer, ops=through("exchange", exchange_ops(config.ops)), back_end=back_end, tell=tell
        )
    return Decoder(
        model,
        weights,
        cache=cache,
        exchange=exchange,
        tables=tables,
        rank=rank,
        ops=config.ops,
        tell_experts=config.eplb.record_routing_tokens > 0,
        comm_sms=config.left_sms,
        parts=timer,
        through=through,
    )
