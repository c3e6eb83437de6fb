"""From a configuration to ranks that can step: read the model, plan the bytes, load the weights, build the parts.

The order is fixed: everything that can be refused is refused before a weight is read, the plan of bytes is announced
before anything is allocated. Knows every part by its constructor; does not know how a step works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from attention_mla import LatentCache
from ep import Exchange, Transport
from eplb import ExpertLoad
from moe import ExpertBank

from .batch import TokenTable
from .cadence import StepBudget
from .checkpoint import TensorSource, open_checkpoint
from .control import Control
from .costs import ItlBudget, StepCosts
from .decoder import Decoder
from .dummy import DummyCheckpoint
from .hardware import read_hardware
from .heartbeat import HeartbeatState
from .memory import MemoryPlan
from .model_config import ModelConfig
from .node_loading import LoadedRank, load_rank
from .node_share import NodePeers
from .outputs import News, Note
from .pages import PagePool
from .prefix import PrefixCache
from .progress import OnProgress, counted
from .ranks import Inbox
from .recorder import Recorder, StampedTransport
from .refusals import check_drafts
from .request import Request
from .roofline import CostShape, RooflineOperations
from .scheduler import Drafter, Scheduler
from .settling import Settled
from .startup import LoadReport
from .straggler import StragglerState
from .weights import DecoderWeights, bytes_to_read, held_tensors, load_banks, load_shared, verify_held
from .worker import Worker

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
    """What ties one rank to the others, and to whoever listens."""

    transport: Transport
    control: Control
    recorder: Recorder
    emit: Callable[[Sequence[News]], None]
    notify: Callable[[Note], None]
    inbox: Inbox


def assemble(
    settled: Settled,
    *,
    seats: Sequence[Seat],
    drafter: Drafter | None,
    on_plan: OnPlan | None,
    on_progress: OnProgress | None,
    peers: NodePeers | None = None,
) -> Parts:
    """Build one worker for each seat. What all ranks hold alike is loaded once and shared by the seats of a process.

    peers   the processes of this node, for the single seat of one of them: they read and keep together what they share
    """
    if on_plan is not None:
        on_plan(settled.plan)
    source = _source(settled, turn=(peers.place, peers.size) if peers is not None else (0, 1))
    report = None
    if peers is not None:
        loaded = _load_with(peers, settled, source, on_progress)
        weights, report = [loaded.weights], loaded.report
    else:
        weights = _load(settled, source, [seat.transport.rank for seat in seats], on_progress)
    budget = _budget(settled)
    if drafter is not None:
        drafter = partial(_guarded, drafter, settled.model.vocab_size)
    workers = tuple(
        _worker(settled, held, seat, budget=budget, drafter=drafter) for seat, held in zip(seats, weights, strict=True)
    )
    return Parts(
        model=settled.model,
        plan=settled.plan,
        workers=workers,
        notes=settled.model.warnings + source.notes,
        load=report,
    )


def _source(settled: Settled, *, turn: tuple[int, int]) -> TensorSource:
    config = settled.config
    if config.load_format == "dummy":
        return DummyCheckpoint(settled.model, seed=config.seed)
    return open_checkpoint(config.model, settled.model, turn=turn)


def _load(
    settled: Settled, source: TensorSource, ranks: Sequence[int], on_progress: OnProgress | None
) -> list[DecoderWeights]:
    """One rank's weights after the other; every tensor that any rank holds is verified before the first is read."""
    model, placement = settled.model, settled.placement
    verify_held(source, model, placement, ranks=ranks)
    names = {name for rank in ranks for name in held_tensors(model, placement, rank)}
    progress = counted(on_progress, total=bytes_to_read(source, names))
    shared = load_shared(source, model, dtype=settled.dtype, device=settled.device, progress=progress)
    return [DecoderWeights.join(shared, _banks(settled, source, rank, progress)) for rank in ranks]


def _load_with(peers: NodePeers, settled: Settled, source: TensorSource, on_progress: OnProgress | None) -> LoadedRank:
    return load_rank(
        source,
        settled.model,
        settled.placement,
        peers=peers,
        dtype=settled.dtype,
        device=settled.device,
        keep_fp8=settled.keep_fp8,
        on_progress=on_progress,
    )


def _banks(
    settled: Settled, source: TensorSource, rank: int, progress: Callable[[int], None]
) -> tuple[ExpertBank | None, ...]:
    return load_banks(
        source,
        settled.model,
        settled.placement,
        rank=rank,
        dtype=settled.dtype,
        device=settled.device,
        keep_fp8=settled.keep_fp8,
        progress=progress,
    )


def _guarded(drafter: Drafter, vocab_size: int, request: Request) -> list[int]:
    return check_drafts(drafter(request), vocab_size)


def _budget(settled: Settled) -> StepBudget | None:
    """How many prompt tokens a step may hold by the cost model, when a latency target is set."""
    config = settled.config
    if config.cadence.itl_target_ms is None:
        return None
    hardware = read_hardware(config.hardware or "")
    operations = RooflineOperations(shape=CostShape.of(settled.model), hardware=hardware, ranks=config.ranks)
    return ItlBudget(costs=StepCosts(operations), target_ms=config.cadence.itl_target_ms)


def _worker(
    settled: Settled, weights: DecoderWeights, seat: Seat, *, budget: StepBudget | None, drafter: Drafter | None
) -> Worker:
    config, model, plan = settled.config, settled.model, settled.plan
    pool = PagePool(plan.num_pages, config.cache.block_size)
    prefix = PrefixCache(pool, enabled=config.scheduler.enable_prefix_caching)
    max_model_len = config.scheduler.max_model_len
    assert max_model_len is not None, "max_model_len is settled before workers are built"
    transport = StampedTransport(seat.transport, seat.recorder)
    return Worker(
        decoder=_decoder(settled, weights, transport),
        scheduler=Scheduler(config.scheduler, pool, prefix, drafter=drafter),
        pool=pool,
        prefix=prefix,
        table=TokenTable(config.scheduler.max_num_seqs, max_model_len, device=settled.device),
        transport=transport,
        control=seat.control,
        recorder=seat.recorder,
        state=HeartbeatState.start(config.cadence, budget=budget),
        stragglers=StragglerState(config=config.straggler),
        async_depth=config.async_depth,
        config_hash=config.digest(model),
        load=ExpertLoad(len(model.moe_layers), model.moe.num_experts if model.moe else 0, device=settled.device),
        placement=settled.placement,
        emit=seat.emit,
        notify=seat.notify,
        inbox=seat.inbox,
    )


def _decoder(settled: Settled, weights: DecoderWeights, transport: Transport) -> Decoder:
    config, model, plan = settled.config, settled.model, settled.plan
    cache = LatentCache(
        model.num_layers, plan.num_pages, config.cache.block_size, model.mla.latent_width, settled.dtype, settled.device
    )
    exchange = table = None
    if model.moe is not None and settled.placement is not None:
        table = settled.placement.table(settled.device)
        exchange = Exchange(
            transport,
            num_slots=settled.placement.num_slots,
            hidden=model.hidden_size,
            top_k=model.moe.top_k,
            dtype=settled.dtype,
            device=settled.device,
            config=config.exchange,
        )
    return Decoder(model, weights, cache=cache, exchange=exchange, table=table, rank=transport.rank)
