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
from .checkpoint import TensorSource, open_checkpoint
from .config import EngineConfig
from .decoder import Decoder
from .dummy import DummyCheckpoint
from .memory import MemoryPlan
from .model_config import ModelConfig
from .pages import PagePool
from .prefix import PrefixCache
from .rows import Update
from .scheduler import Drafter, Scheduler
from .settling import Settled, settle
from .weights import DecoderWeights, bytes_to_read, held_tensors, load_banks, load_shared, verify_held
from .worker import Worker

OnPlan = Callable[[MemoryPlan], None]
OnProgress = Callable[[int, int], None]
Emit = Callable[[int, Update], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    model: ModelConfig
    plan: MemoryPlan
    workers: tuple[Worker, ...]
    notes: tuple[str, ...]
    """What the user should know of the model's files, a line each."""


def assemble(
    config: EngineConfig,
    *,
    transports: Sequence[Transport],
    emit: Emit,
    drafter: Drafter | None,
    on_plan: OnPlan | None,
    on_progress: OnProgress | None,
) -> Parts:
    """Build one worker for each transport. What all ranks hold alike is loaded once and shared by them."""
    settled = settle(config)
    if on_plan is not None:
        on_plan(settled.plan)
    source = _source(settled)
    weights = _load(settled, source, on_progress)
    workers = tuple(
        _worker(settled, weights[transport.rank], transport, partial(emit, transport.rank), drafter)
        for transport in transports
    )
    return Parts(model=settled.model, plan=settled.plan, workers=workers, notes=settled.model.warnings + source.notes)


def _source(settled: Settled) -> TensorSource:
    config = settled.config
    if config.load_format == "dummy":
        return DummyCheckpoint(settled.model, seed=config.seed)
    return open_checkpoint(config.model, settled.model)


def _load(settled: Settled, source: TensorSource, on_progress: OnProgress | None) -> list[DecoderWeights]:
    """One rank's weights after the other; every tensor that any rank holds is verified before the first is read."""
    model, placement, ranks = settled.model, settled.placement, range(settled.config.ranks)
    verify_held(source, model, placement, ranks=ranks)
    names = {name for rank in ranks for name in held_tensors(model, placement, rank)}
    progress = _Progress(on_progress, total=bytes_to_read(source, names))
    shared = load_shared(source, model, dtype=settled.dtype, device=settled.device, progress=progress)
    return [DecoderWeights.join(shared, _banks(settled, source, rank, progress)) for rank in ranks]


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


class _Progress:
    """Turns bytes since the last call into bytes so far and bytes in all."""

    def __init__(self, report: OnProgress | None, *, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._report is not None:
            self._report(self._done, self._total)


def _worker(
    settled: Settled,
    weights: DecoderWeights,
    transport: Transport,
    emit: Callable[[Update], None],
    drafter: Drafter | None,
) -> Worker:
    config, model, plan = settled.config, settled.model, settled.plan
    pool = PagePool(plan.num_pages, config.cache.block_size)
    prefix = PrefixCache(pool, enabled=config.scheduler.enable_prefix_caching)
    max_model_len = config.scheduler.max_model_len
    assert max_model_len is not None, "max_model_len is settled before workers are built"
    return Worker(
        decoder=_decoder(settled, weights, transport),
        scheduler=Scheduler(config.scheduler, pool, prefix, drafter=drafter),
        pool=pool,
        prefix=prefix,
        table=TokenTable(config.scheduler.max_num_seqs, max_model_len, device=settled.device),
        transport=transport,
        async_depth=config.async_depth,
        config_hash=config.digest(model),
        load=ExpertLoad(len(model.moe_layers), model.moe.num_experts if model.moe else 0, device=settled.device),
        placement=settled.placement,
        emit=emit,
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
