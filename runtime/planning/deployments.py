"""Which group of ranks serves a goal best: every size of group, batch, number of tracks and copies is tried and timed.

    step    decode of `batch` requests a rank, by the cost model, over the efficiency that published deployments reach
    beat    prompts of N steps computed in one, on all ranks (see `cadence`); each step's share of it counts
    TPOT    (N x step + beat) / N         TTFT    half an interval, then a beat and a step

Pure: numbers in, numbers out; what fits is the memory plan's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ..costs.costs import Operations, StepCosts, StepShape, StepTime
from ..costs.device_costs import DeviceCosts
from ..costs.roofline import CostShape
from ..model.model_config import ModelConfig
from ..scheduling.overlap import comm_share
from ..settings.config import CacheConfig, EngineConfig
from ..settings.cost_group import expected_imbalance, group_of
from ..settings.decisions import settle_exchange_on
from ..settings.memory_numbers import memory_numbers
from ..weights.memory import MemoryPlan, plan_memory
from .goals import Goals, fullest_prompts

BATCHES = (1, 2, 4, 8, 12, *range(16, 128, 8), *range(128, 257, 16), *range(288, 513, 32))
LONGEST_INTERVAL = 64
NEARLY = 1.02
"""An interval that gains less than this over a shorter one is not worth the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where and what: the model, the device and what it costs, and the settings that stay as they are."""

    model: ModelConfig
    costs: DeviceCosts
    base: EngineConfig
    on_gpu: bool
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One deployment and what it is expected to do; times in milliseconds, of one group.

    step          a step that only decodes, as modelled; `decode_ms` is it over the efficiency
    beat_ms       the prompts of `interval` steps
    """

    config: EngineConfig
    plan: MemoryPlan
    batch: int
    tracks: int
    imbalance: float
    padding: float
    step: StepTime
    decode_ms: float
    prompt_ms: float
    interval: int
    beat_ms: float

    @property
    def tpot_ms(self) -> float:
        """Between two tokens of a request, on average."""
        return self.decode_ms + self.beat_ms / self.interval

    @property
    def ttft_ms(self) -> float:
        """Until the first token of a request that finds room, on average."""
        return (self.interval - 1) / 2 * self.decode_ms + max(self.beat_ms, self.prompt_ms) + self.decode_ms

    @property
    def tokens_per_gpu(self) -> float:
        """Output tokens a second and GPU."""
        return 1e3 * self.batch / self.tpot_ms

    @property
    def tokens_per_user(self) -> float:
        """Output tokens a second and request."""
        return 1e3 / self.tpot_ms


def group_sizes(goals: Goals, model: ModelConfig, *, asked: int | None = None) -> list[int]:
    """Ranks of a group: those that share the GPUs evenly, fill nodes or divide one, and hold an expert each."""
    most = model.moe.num_experts if model.moe is not None else goals.gpus
    if asked is not None:
        return [asked] if asked <= most else []
    return [
        ranks
        for ranks in range(1, min(goals.gpus, most) + 1)
        if goals.gpus % ranks == 0 and (ranks % goals.node_size == 0 or goals.node_size % ranks == 0)
    ]


def copies_of(model: ModelConfig, ranks: int) -> list[int]:
    """Redundant experts worth a try: as few as fill all slots evenly, and about an eighth of the experts more."""
    if model.moe is None or ranks == 1:
        return [0]
    experts = model.moe.num_experts
    fill = -experts % ranks
    some = -(-(experts + experts // 8) // ranks) * ranks - experts
    return sorted({fill, some})


def points(site: Site, goals: Goals, *, ranks: Sequence[int], batches: Sequence[int] = BATCHES) -> Iterator[Point]:
    """Every deployment that fits, in no order."""
    for size, cache in product(ranks, cache_choices(site.base.cache)):
        for copies in copies_of(site.model, size):
            for batch in batches:
                config = _config(site, goals, ranks=size, copies=copies, batch=batch)
                config, settled = replace(config, cache=cache), _settled(site, replace(config, cache=cache))
                plan = plan_of(site, settled)
                if plan.shortfall_bytes or plan.concurrent_requests(goals.context) < batch:
                    break  # a larger batch needs more
                for tracks in _tracks(size, batch):
                    yield _point(site, goals, config, settled, plan, tracks=tracks)


def cache_choices(cache: CacheConfig) -> list[CacheConfig]:
    """As asked; where the number format of latents is left open, in fp8 as well."""
    if cache.kv_cache_dtype != "auto":
        return [cache]
    return [cache, replace(cache, kv_cache_dtype="fp8")]


def config_of(site: Site, goals: Goals, *, ranks: int, batch: int) -> EngineConfig:
    """The configuration of that size, with as few copies as fill its slots."""
    return _config(site, goals, ranks=ranks, copies=copies_of(site.model, ranks)[0], batch=batch)


def plan_of(site: Site, config: EngineConfig) -> MemoryPlan:
    """Where a rank's bytes go."""
    device_bytes = site.costs.hardware.memory_bytes
    return plan_memory(site.model, memory_numbers(config, site.model, device_bytes=device_bytes, on_gpu=site.on_gpu))


def _settled(site: Site, config: EngineConfig) -> EngineConfig:
    """With nothing left open about the exchange, so that the device's file need not be asked again."""
    settled, _ = settle_exchange_on(site.costs.hardware, config, site.model, local_size=None, on_gpu=site.on_gpu)
    return replace(settled, hardware=None, cadence=replace(settled.cadence, itl_target_ms=None))


def _point(
    site: Site, goals: Goals, config: EngineConfig, settled: EngineConfig, plan: MemoryPlan, *, tracks: int
) -> Point:
    """One deployment, timed."""
    batch = config.scheduler.max_num_seqs
    imbalance = expected_imbalance(settled, site.model, tokens=batch)
    group = group_of(settled, site.model, tokens=batch, imbalance=imbalance)
    operations = site.costs.operations(CostShape.of(site.model, fp8_cache=config.cache.is_fp8), group)
    costs = StepCosts(operations, comm_share=comm_share(config.overlap, site.costs.hardware))
    step = costs.step_time([StepShape(decode_tokens=batch, context_len=goals.mean_context)], tracks=tracks)
    decode_ms = step.total_us / 1e3 / site.efficiency
    prompt_ms = _prompt_ms(operations, goals) / site.efficiency if goals.prefill == "here" else 0.0
    interval, beat_ms = _beat(goals, ranks=config.ranks, batch=batch, prompt_ms=prompt_ms, decode_ms=decode_ms)
    dbo = replace(config.overlap, dbo="auto" if tracks > 1 else "off")
    cadence = replace(config.cadence, prefill_schedule_interval=interval)
    return Point(
        config=replace(config, overlap=dbo, cadence=cadence),
        plan=plan,
        batch=batch,
        tracks=tracks,
        imbalance=imbalance,
        padding=group.padding,
        step=step,
        decode_ms=decode_ms,
        prompt_ms=prompt_ms,
        interval=interval,
        beat_ms=beat_ms,
    )


def meets(point: Point, goals: Goals) -> bool:
    """Whether its latencies are within the goals."""
    slow = goals.tpot_ms is not None and point.tpot_ms > goals.tpot_ms
    late = goals.ttft_ms is not None and point.ttft_ms > goals.ttft_ms
    return not (slow or late)


def best(found: Sequence[Point]) -> Point:
    """The most tokens a second and GPU; of those within a hundredth the first in order of latents, then of steps.

    Latents in the run's own format come first: fp8 changes results.
    """
    most = max([point.tokens_per_gpu for point in found])
    near = [point for point in found if point.tokens_per_gpu >= 0.99 * most]
    return min(near, key=lambda point: (point.config.cache.kv_cache_dtype == "fp8", point.tpot_ms))


def pareto(found: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both tokens/s a GPU and tokens/s a user; the fastest for a user first."""
    front: list[Point] = []
    for point in sorted(found, key=lambda each: (-each.tokens_per_user, -each.tokens_per_gpu)):
        if not front or point.tokens_per_gpu > front[-1].tokens_per_gpu:
            front.append(point)
    return front


def _tracks(ranks: int, batch: int) -> tuple[int, ...]:
    return (1, 2) if ranks > 1 and batch > 1 else (1,)


def _config(site: Site, goals: Goals, *, ranks: int, copies: int, batch: int) -> EngineConfig:
    base = site.base
    moves = ranks > 1 and site.model.moe is not None
    return replace(
        base,
        ranks=ranks,
        node_size=min(goals.node_size, ranks),
        scheduler=replace(base.scheduler, max_num_seqs=batch, max_model_len=goals.context),
        exchange=replace(base.exchange, round_tokens=max(base.exchange.round_tokens, batch)),
        eplb=replace(base.eplb, enable_eplb=moves, num_redundant_experts=copies if moves else 0),
    )


@lru_cache(maxsize=256)
def _prompt_ms(operations: Operations, goals: Goals) -> float:
    """All of one prompt."""
    return goals.input_len * operations.prefill_us(goals.input_len / 2) / 1e3


def _beat(goals: Goals, *, ranks: int, batch: int, prompt_ms: float, decode_ms: float) -> tuple[int, float]:
    """The interval, and what its prompts take: the shortest that is nearly as good as any within the goal for TTFT."""
    if not prompt_ms:
        return 1, 0.0
    beats: dict[int, float] = {}
    for interval in _intervals(goals, batch=batch) if ranks > 1 else (1,):
        per_rank = interval * batch / goals.output_len
        beats[interval] = prompt_ms * fullest_prompts(per_rank=per_rank, ranks=ranks)
    late = goals.ttft_ms
    kept = {
        interval: beat_ms
        for interval, beat_ms in beats.items()
        if late is None or (interval - 1) / 2 * decode_ms + max(beat_ms, prompt_ms) + decode_ms <= late
    } or {1: beats[1]}
    least = min([decode_ms + beat_ms / interval for interval, beat_ms in kept.items()])
    chosen = min([interval for interval, beat in kept.items() if decode_ms + beat / interval <= NEARLY * least])
    return chosen, kept[chosen]


def _intervals(goals: Goals, *, batch: int) -> list[int]:
    """Powers of two, and those in which each rank gets about one prompt, or two, or three: those waste least."""
    whole = [prompts * goals.output_len // batch for prompts in (1, 2, 3)]
    powers = [1 << place for place in range(LONGEST_INTERVAL.bit_length())]
    return sorted({interval for interval in (*powers, *whole) if 1 <= interval <= LONGEST_INTERVAL})
