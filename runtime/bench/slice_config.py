"""What a rank's slice is told, and the engine's configuration that follows from it. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from ep import ExchangeConfig
from ep.threads import MAX_RANKS

from ..model.model_config import ModelConfig
from ..scheduling.scheduler import SchedulerConfig
from ..settings.config import CacheConfig, DTypeName, EngineConfig, KvCacheDType
from ..settings.decisions import run_dtype, settle_ops, topology_of
from ..settings.memory_numbers import memory_numbers
from ..settings.settling import Settled
from ..weights.memory import plan_memory
from .slice_routing import MOST_LAYERS, Placing, Trace

FEWEST_LAYERS = 3
"""Of a cut model: one without experts, if the model has any, and two with, for the last one is measured in part."""
WARM_STEPS = 3


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
        return self.first_position + self.most_new

    @property
    def most_new(self) -> int:
        """Tokens that the measured steps may add to a request."""
        return 4 * (WARM_STEPS + self.steps)

    def fitted(self, model: ModelConfig) -> SliceConfig:
        """With as much context as the model's length leaves, where this asks for more."""
        most = (model.max_position - self.most_new) // self.block_size * self.block_size
        return replace(self, context=most) if 1 <= most < self.context else self


def cut_layers(model: ModelConfig, layers: int | None) -> ModelConfig:
    """The model with so many layers: one without experts if it has any, the others with. ValueError without experts."""
    if model.moe is None:
        raise ValueError("the model has no experts; a rank's slice of it is the whole of it, e.g. deepseek-v3")
    if layers is None or layers >= model.num_layers:
        return model
    return replace(model, num_layers=layers, num_dense_layers=min(model.num_dense_layers, 1))


def engine_config(config: SliceConfig, model: ModelConfig) -> EngineConfig:
    if config.most_positions > model.max_position:
        most = (model.max_position - config.most_new) // config.block_size * config.block_size
        raise ValueError(
            f"context is {config.context}; with the {config.most_new} tokens that the steps add, the model allows at "
            f"most {model.max_position}, e.g. {max(most, 0)}"
        )
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


def settle_slice(engine: EngineConfig, model: ModelConfig, by_layer: dict[int, Any]) -> Settled:
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


def trace_of(config: SliceConfig, model: ModelConfig) -> Trace:
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
