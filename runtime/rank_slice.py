"""One rank of a wide group, alone on a device: its own share of weights, cache and requests, the others stood in for.

Model, exchange, launcher, sampler and paged cache are the engine's; only the transport is not (`ep.stand_in`), and the
latents and tokens of requests that already decode are random numbers. So everything is measured that one rank does in a
step, and nothing that travels. `stages` says what the parts of a step take, `rank_slice_costs` what they should take
and what a group of such ranks would do.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from attention_mla import LatentCache
from dbo import DboConfig
from dbo.policy import Choice
from ep import ExchangeBytes, ExchangeConfig, Terms
from ep.blueprint import Blueprint
from ep.lanes import LANES, LanedTransport
from ep.stand_in import Script, StandIn, land, least_level
from ep.threads import MAX_RANKS

from .assembly import build_decoder, load_ranks, weight_source
from .batch import RequestTable
from .cadence import Reason
from .config import CacheConfig, DTypeName, EngineConfig, KvCacheDType
from .decoder import Decoder
from .graph_device import GRAPH_DEVICES
from .graphs import GraphRunner, Sizes
from .heartbeat import StepPlan
from .launcher import Launched, Launcher
from .memory import plan_memory
from .model_config import ModelConfig, read_model_config
from .recorder import Unwatched
from .request import Request
from .rows import Row, Rows
from .runner import EagerRunner
from .runner_choice import why_eager
from .sampler_ops import SamplerOps, sampler_ops
from .sampling_params import SamplingParams
from .scheduler import SchedulerConfig
from .settling import Settled, memory_numbers, run_dtype, settle_exchange, settle_ops, topology_of
from .slice_routing import MOST_LAYERS, Placing, Trace, exchanges, placements, received_pairs
from .stages import CLOCKS, HEAD, SAMPLER, STAGES, Interval, MarkedGraphs, Staged, Stages, medians
from .switch import Switch

FEWEST_LAYERS = 3
"""Of a cut model: one without experts, if the model has any, and two with, for the last one is measured in part."""
WARM_STEPS = 3
FILLED_AT_ONCE = 1 << 16
"""Positions of the cache; their float32 latents are a few hundred MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceConfig:
    """What one rank of `ranks` has to do.

    layers     layers that are built; None: all of the model's
    routing    uniform, power-law, or a recording of routing; `skew` is the power
    rank       None: the one whose experts get most rows
    steps      that are measured, of each kind
    """

    model: str
    ranks: int = 32
    batch: int = 128
    context: int = 2048
    layers: int | None = None
    routing: str = "uniform"
    skew: float = 1.0
    placing: Placing = "balanced"
    redundant: int = 0
    rank: int | None = None
    node_size: int = 8
    hierarchical: Literal["auto", "on", "off"] = "auto"
    dispatch_dtype: Literal["run", "fp8"] = "fp8"
    dtype: DTypeName = "auto"
    kv_cache_dtype: KvCacheDType = "auto"
    device: str = "cuda"
    ops: Literal["auto", "reference", "triton"] = "auto"
    hardware: str = "profiles/hardware/h200.toml"
    block_size: int = 64
    steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, legal in (("ranks", 1, 32), ("batch", 1, 128), ("context", 1, 2048), ("steps", 1, 20)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}, e.g. {legal}")
        if self.ranks > MAX_RANKS:
            raise ValueError(
                f"ranks is {self.ranks}; the others are acted out as threads, at most {MAX_RANKS}, e.g. 32"
            )
        if self.layers is not None and self.layers < FEWEST_LAYERS:
            raise ValueError(f"layers is {self.layers}; it must be at least {FEWEST_LAYERS}, e.g. {FEWEST_LAYERS}")
        if self.rank is not None and not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank is {self.rank}; ranks are 0 to {self.ranks - 1}, e.g. 0")
        if not 0.0 <= self.skew <= 4.0:
            raise ValueError(f"skew is {self.skew}; it must be from 0 to 4, e.g. 1")

    @property
    def first_position(self) -> int:
        """Context that is cached at the start: a request enters its slot at the start of a page."""
        return -(-self.context // self.block_size) * self.block_size

    @property
    def most_positions(self) -> int:
        """That a request may come to have."""
        return self.first_position + 4 * (WARM_STEPS + self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTimes:
    """Of one batch size, microseconds.

    step_us      a step that is not marked, what stands in for the wire included; median and middle half
    intervals    the parts of a marked step, medians
    sent         bytes that this rank put on the wire in a step, all layers
    """

    batch: int
    step_us: float
    spread_us: float
    intervals: tuple[Interval, ...]
    sent: ExchangeBytes


def cut_layers(model: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with so many layers: one without experts if it has any, the others with. ValueError without experts."""
    if model.moe is None:
        raise ValueError("the model has no experts; a rank's slice of it is the whole of it, e.g. deepseek-v3")
    if layers is None or layers >= model.num_layers:
        return model
    return replace(model, num_layers=layers, num_dense_layers=min(model.num_dense_layers, 1))


class RankSlice:
    """One rank, built. `measure` may be called for any batch up to the config's."""

    def __init__(self, config: SliceConfig) -> None:
        """Raises ValueError for what cannot be run here, with the arithmetic where memory is short."""
        self.config = config
        self.whole_model = read_model_config(Path(config.model))
        self.model = cut_layers(self.whole_model, config.layers)
        engine = _engine_config(config, self.model)
        engine, self.exchange_why = settle_exchange(engine, self.model, local_size=None, on_gpu=config.device == "cuda")
        self._trace = _trace(config, self.model)
        places = placements(
            self._trace,
            topology_of(engine),
            placing=config.placing,
            redundant=config.redundant,
            tokens=config.batch,
        )
        by_layer = {layer: places[index % len(places)] for index, layer in enumerate(self.model.moe_layers)}
        self.settled = _settle(engine, self.model, by_layer)
        self._places = places
        self.pairs_YR = received_pairs(self.exchanges(config.batch), slots_per_rank=places[0].slots_per_rank)
        self.rank = int(self.pairs_YR.sum(axis=0).argmax()) if config.rank is None else config.rank
        self._marks = Stages(CLOCKS[config.device]())
        self._outside = Stages(CLOCKS[config.device]()) if self.captured else self._marks
        self._switch = Switch()
        self._transport = StandIn(self.rank, config.ranks, row=self.blueprint.row, script=Script(there=({},), back={}))
        self._build()

    @property
    def blueprint(self) -> Blueprint:
        """The sizes of the exchange."""
        settled, moe = self.settled, self.model.moe
        assert moe is not None
        return Blueprint(
            topology=settled.topology,
            num_slots=next(iter(settled.placements.values())).num_slots,
            hidden=self.model.hidden_size,
            top_k=moe.top_k,
            dtype=settled.dtype,
            config=settled.config.exchange,
        )

    @property
    def imbalance(self) -> float:
        """Pairs that this rank's experts compute over what the average rank's do."""
        return float(self.pairs_YR[:, self.rank].sum() / self.pairs_YR.mean(axis=1).sum())

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as graphs."""
        return not why_eager(self.settled, ranks_here=1)

    def measure(self, batch: int) -> SliceTimes:
        """Real steps of `batch` requests: some to warm up, then as many as the config says, then as many marked."""
        steps, clock = self.steps(batch), CLOCKS[self.config.device]()
        with torch.inference_mode():
            for _ in range(WARM_STEPS):
                steps.run()
            sent = self._decoder.sent_bytes
            times = [_timed(clock, steps) for _ in range(self.config.steps)]
            now = self._decoder.sent_bytes
            steps.launcher = self._launcher(batch, steps.level, marked=True)
            marked = [self._marked(steps) for _ in range(self.config.steps)]
        low, middle, high = statistics.quantiles([clock.between_us(*each) for each in times], n=4, method="inclusive")
        return SliceTimes(
            batch=batch,
            step_us=middle,
            spread_us=high - low,
            intervals=tuple(medians(marked)),
            sent=ExchangeBytes(
                network=(now.network - sent.network) // self.config.steps,
                node=(now.node - sent.node) // self.config.steps,
            ),
        )

    def steps(self, batch: int) -> Steps:
        """Those of `batch` requests; the others send what they would to a rank of such a group."""
        found = self.exchanges(batch)
        level = least_level(self.blueprint, found, bucket=batch)
        terms = Terms(bucket=batch, level=level)
        self._transport.script = land(
            self.blueprint,
            found,
            rank=self.rank,
            terms=terms,
            device=self.settled.device,
            first=self.model.num_dense_layers,
            seed=self.config.seed,
        )
        launcher = self._launcher(batch, level, marked=False)
        return Steps(self._requests(batch), launcher, level=level, first=self.config.first_position)

    def exchanges(self, batch: int) -> list[list[Tensor]]:
        """int64 slots [batch, K] of every rank, of one exchange a layer; layers past the last begin again."""
        return exchanges(self._trace, self._places, self.settled.topology, tokens=batch, seed=self.config.seed + 1)

    def _marked(self, steps: Steps) -> list[Interval]:
        """One step. Inside a graph marks are stamped by its replay; head and sampler come after it."""
        self._outside.begin()
        steps.run()
        self._outside.end()
        if not self.captured:
            return self._outside.intervals()
        after = [each for each in self._outside.intervals() if each.stage in (HEAD, SAMPLER)]
        return [*self._marks.intervals(), *after]

    def _build(self) -> None:
        settled = self.settled
        [weights] = load_ranks(settled, weight_source(settled), [self.rank], None)
        transport = LanedTransport(
            self._staged("transport", self._transport), LANES[settled.device.type](settled.device)
        )
        self._decoder: Decoder = build_decoder(settled, weights, transport, through=self._staged)
        fill(self._decoder.cache, seed=self.config.seed)
        self._table = RequestTable(
            self.config.batch, self.config.most_positions, page_size=self.config.block_size, device=settled.device
        )
        self._sampler = cast(SamplerOps, self._staged("sampler", sampler_ops(settled.config.ops)))

    def _launcher(self, batch: int, level: int, *, marked: bool) -> Launcher:
        """What launches steps of so many requests: captured where that can be, with marks in the graph or without."""
        decoder = cast(Decoder, self._staged("decoder", self._decoder))
        runner = None
        if self.captured:
            device = GRAPH_DEVICES[self.config.device](self.settled.device)
            runner = GraphRunner(
                EagerRunner(self._decoder, self._table),
                self._decoder,
                self._table,
                device=MarkedGraphs(device, self._marks) if marked else device,
                switch=self._switch,
                sizes=Sizes(decode=(batch,), pieces=()),
                most_context=batch * self.config.most_positions,
                level=level,
            )
            runner.prepare()
        return Launcher(
            decoder, self._table, recorder=Unwatched(), overlap=DboConfig(), sampler=self._sampler, runner=runner
        )

    def _staged(self, name: str, ops: Any) -> Any:
        marks = self._outside if name in ("decoder", "sampler") else self._marks
        return Staged(self._switch.through(name, ops), STAGES[name], marks)

    def _requests(self, batch: int) -> list[Request]:
        """That have their context in the cache; pages lie in no order."""
        config, dice = self.config, random.Random(self.config.seed)
        per_request = -(-config.most_positions // config.block_size)
        pages = dice.sample(range(batch * per_request), batch * per_request)
        requests = []
        for slot in range(batch):
            request = Request(
                id=f"request-{slot}",
                prompt=tuple(dice.choices(range(self.model.vocab_size), k=config.first_position + 1)),
                params=SamplingParams(temperature=0.0),
                arrival=slot,
            )
            request.slot = slot
            request.pages = pages[slot * per_request : (slot + 1) * per_request]
            requests.append(request)
        return requests


class Steps:
    """Steps in which the same requests decode, each launched before the one before it is read."""

    def __init__(self, requests: Sequence[Request], launcher: Launcher, *, level: int, first: int) -> None:
        self._requests = requests
        self.launcher = launcher
        self.level = level
        self._position = first
        self._number = 0
        self._unread: Launched | None = None

    def run(self) -> None:
        """One more; then the one before it is read."""
        launched = self.launch()
        if self._unread is not None:
            self._unread.tokens()
        self._unread = launched

    def launch(self) -> Launched:
        """One more."""
        rows = Rows.of([Row(request, self._position, 1, 0, True) for request in self._requests])
        launched = self.launcher.launch(rows, _plan(self._number, len(rows), self.level))
        self._position += 1
        self._number += 1
        return launched


def _timed(clock: Any, steps: Steps) -> tuple[Any, Any]:
    begin = clock.stamp()
    steps.run()
    return begin, clock.stamp()


def fill(cache: LatentCache, *, seed: int) -> None:
    """Latents of unit size in every page: what a device computes of zeros costs it less power than what it meets."""
    device, row = cache.pages.device, cache.row
    dice = torch.Generator(device).manual_seed(seed)
    places = torch.arange(cache.num_pages * cache.page_size, device=device)
    for layer in range(cache.pages.shape[0]):
        for places_T in places.split(FILLED_AT_ONCE):
            latents_TW = torch.randn(len(places_T), row.rank + row.rope_dim, generator=dice, device=device)
            cache.append(layer, latents_TW.to(row.dtype), places_T)


def _engine_config(config: SliceConfig, model: ModelConfig) -> EngineConfig:
    pages = config.batch * -(-config.most_positions // config.block_size)
    engine = EngineConfig(
        model=config.model,
        ranks=config.ranks,
        dtype=config.dtype,
        device=config.device,
        load_format="dummy",
        seed=config.seed,
        hardware=config.hardware,
        node_size=min(config.node_size, config.ranks),
        cache=CacheConfig(block_size=config.block_size, num_blocks=pages + 1, kv_cache_dtype=config.kv_cache_dtype),
        scheduler=SchedulerConfig(
            max_num_seqs=config.batch, max_num_batched_tokens=config.batch, max_model_len=config.most_positions
        ),
        exchange=ExchangeConfig(
            exchange="bounded",
            hierarchical=config.hierarchical,
            dispatch_dtype=config.dispatch_dtype,
            round_tokens=config.batch,
        ),
    )
    return replace(engine, ops=settle_ops(replace(engine, ops=config.ops), model, device=torch.device(config.device)))


def _settle(engine: EngineConfig, model: ModelConfig, by_layer: dict[int, Any]) -> Settled:
    """Nothing is left open, and it fits the device: it is all this rank's."""
    device = torch.device(engine.device)
    on_gpu = device.type == "cuda"
    device_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else 1 << 40
    numbers = memory_numbers(engine, model, device_bytes=device_bytes, on_gpu=on_gpu)
    placement = next(iter(by_layer.values()))
    redundant = placement.num_slots - placement.num_experts
    plan = plan_memory(model, replace(numbers, redundant_experts=max(redundant, 0)))
    plan.check_fits()
    return Settled(
        config=engine,
        model=model,
        dtype=run_dtype(engine, model),
        device=device,
        placements=by_layer,
        plan=replace(plan, slots_per_rank=placement.slots_per_rank),
        topology=topology_of(engine),
        capacities=None,
    )


def _trace(config: SliceConfig, model: ModelConfig) -> Trace:
    assert model.moe is not None
    if config.routing in ("uniform", "power-law"):
        return Trace.drawn(
            model.moe,
            shape=cast(Literal["uniform", "power-law"], config.routing),
            skew=config.skew,
            num_layers=min(len(model.moe_layers), MOST_LAYERS),
            seed=config.seed,
        )
    return Trace.recorded(model.moe, config.routing)


def _plan(step: int, bucket: int, level: int) -> StepPlan:
    """Every rank decodes as many tokens."""
    return StepPlan(
        step=step,
        wave=0,
        bucket=bucket,
        epoch=0,
        prefill_allowed=None,
        reason=Reason.NO_PROMPTS,
        last=False,
        stalled=False,
        pause=False,
        paused=False,
        drain=False,
        drained=False,
        failed=None,
        clean=step - 1,
        rerun_from=None,
        capacity_level=level,
        tracks=1,
        track_tokens=bucket,
        overlap=Choice.OFF,
    )
