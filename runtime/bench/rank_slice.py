"""One rank of a wide group, alone on a device: its own share of weights, cache and requests, the others stood in for.

Model, exchange, launcher, sampler and paged cache are the engine's; only the transport is not (`ep.stand_in`), and the
latents and tokens of requests that already decode are random numbers. So everything is measured that one rank does in a
step, and nothing that travels. `stages` says what the parts of a step take, `rank_slice_costs` what they should take
and what a group of such ranks would do.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dbo import DboConfig
from ep import ExchangeBytes, Terms
from ep.blueprint import Blueprint
from ep.lanes import LANES, LanedTransport
from ep.stand_in import Script, StandIn, land, least_level

from ..assembly import build_decoder
from ..failure.recorder import Unwatched
from ..forward.batch import RequestTable
from ..forward.decoder import Decoder
from ..graphs.capturing import Captures
from ..graphs.graph_config import Sizes
from ..graphs.graph_device import GRAPH_DEVICES
from ..graphs.graphs import GraphRunner
from ..graphs.runner import EagerRunner
from ..graphs.switch import Switch
from ..graphs.sync_guard import NoGuard
from ..loading import load_ranks, weight_source
from ..loop.launcher import Launcher
from ..model.model_config import read_model_config
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..sampling.sampler_ops import SamplerOps, sampler_ops
from ..settings.decisions import settle_exchange, topology_of
from ..settings.graph_plan import why_eager
from .slice_config import WARM_STEPS, SliceConfig, cut_layers, engine_config, settle_slice, trace_of
from .slice_routing import exchanges, placements, received_pairs
from .slice_steps import Steps, fill
from .stages import CLOCKS, HEAD, SAMPLER, STAGES, Interval, MarkedGraphs, Staged, Stages, medians


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


class RankSlice:
    """One rank, built. `measure` may be called for any batch up to the config's."""

    def __init__(self, config: SliceConfig) -> None:
        """Raises ValueError for what cannot be run here, with the arithmetic where memory is short."""
        self.config = config
        self.whole_model = read_model_config(Path(config.model))
        self.model = cut_layers(self.whole_model, config.layers)
        engine = engine_config(config, self.model)
        engine, self.exchange_why = settle_exchange(engine, self.model, local_size=None, on_gpu=config.device == "cuda")
        self._trace = trace_of(config, self.model)
        places = placements(
            self._trace,
            topology_of(engine),
            placing=config.placing,
            redundant=config.redundant,
            tokens=config.batch,
        )
        by_layer = {layer: places[index % len(places)] for index, layer in enumerate(self.model.moe_layers)}
        self.settled = settle_slice(engine, self.model, by_layer)
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
        return not why_eager(self.settled.config, self.model, self.settled.device, ranks_here=1)

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
            eager = EagerRunner(self._decoder, self._table)
            captures = Captures(
                eager,
                self._decoder,
                self._table,
                device=MarkedGraphs(device, self._marks) if marked else device,
                switch=self._switch,
                sizes=Sizes(decode=(batch,), pieces=()),
                most_context=batch * self.config.most_positions,
                guard=NoGuard(),
                level=level,
            )
            runner = GraphRunner(eager, self._decoder, self._table, captures)
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


def _timed(clock: Any, steps: Steps) -> tuple[Any, Any]:
    begin = clock.stamp()
    steps.run()
    return begin, clock.stamp()
