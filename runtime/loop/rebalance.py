"""The engine's side of moving experts: where they sit at the start, and a rank's rebalancer built from its parts.

Knows settings, banks and the checkpoint; when and how experts move is `eplb`'s.

Shapes: B bytes of an expert's blob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ep import Transport
from eplb import ExpertLoad
from eplb.config import EplbConfig
from eplb.goal import Planner, Question
from eplb.migration import ExpertLayer, Fetch, Pool
from eplb.moves import Speeds
from eplb.planner import PlanConfig, RebalancePlan, check_plan, plan
from eplb.rebalancer import Rebalancer
from moe import ExpertBank, ExpertPlacement, MoeConfig, PlacementTable, spread

from ..model.model_config import ModelConfig
from ..model.model_shapes import expert_tensors
from ..weights.checkpoint import TensorSource
from ..weights.weight_layout import Places, lay_out_bank, lay_out_fp8_bank, own_memory
from .routing_record import read_routing

_GB = 1e9


def start_placements(config: EplbConfig, model: ModelConfig, *, ranks: int) -> dict[int, ExpertPlacement]:
    """Where experts sit before the first step, by layer; empty for a model without experts.

    Raises ValueError for settings that do not go with the model or the number of ranks, or a recording of another one.
    """
    moe = model.moe
    if moe is None:
        _refuse_without_experts(config)
        return {}
    start = spread(moe.num_experts, ranks, config.num_redundant_experts)
    check_plan(plan_config(config, moe), num_experts=moe.num_experts, num_ranks=ranks)
    if config.init_placement is None:
        return dict.fromkeys(model.moe_layers, start)
    loads_YE = read_routing(config.init_placement).loads_YE
    wanted = (len(model.moe_layers), moe.num_experts)
    if tuple(loads_YE.shape) != wanted:
        raise ValueError(
            f"init_placement is {config.init_placement!r}, a recording of {loads_YE.shape[0]} layers with "
            f"{loads_YE.shape[1]} experts; the model has {wanted[0]} with {wanted[1]}"
        )
    found = plan(loads_YE, old=[start] * wanted[0], config=plan_config(config, moe))
    return dict(zip(model.moe_layers, [replace(each, epoch=0) for each in found.placements], strict=True))


def plan_config(config: EplbConfig, moe: MoeConfig) -> PlanConfig:
    """The planner's settings, as far as they are the same for every plan."""
    return PlanConfig(
        num_redundant=config.num_redundant_experts,
        top_k=moe.top_k,
        groups=moe.num_groups if moe.is_group_limited else 1,
        policy=config.eplb_policy,
    )


def widest(placements: Mapping[int, ExpertPlacement], num_experts: int) -> int:
    """Columns of a map that can show any placement of as many slots."""
    return max([placement.num_slots for placement in placements.values()]) - num_experts + 1


def planner_of(config: EplbConfig, moe: MoeConfig) -> Planner:
    """Plans for the loads of all ranks, in steps as large as those that were counted."""

    def make(question: Question) -> RebalancePlan:
        settings = replace(
            plan_config(config, moe),
            node_size=question.node_size,
            tokens_per_rank=question.tokens_per_rank,
            min_gain=config.eplb_min_gain / 2,
        )
        return plan(question.counts_YE, old=question.old, config=settings)

    return make


def build_rebalancer(
    config: EplbConfig,
    model: ModelConfig,
    placements: Mapping[int, ExpertPlacement],
    *,
    banks: Mapping[int, ExpertBank],
    tables: Mapping[int, PlacementTable],
    load: ExpertLoad,
    transport: Transport,
    source: TensorSource,
    node_size: int,
) -> Rebalancer | None:
    """A rank's part in moving experts; None where none move. Allocates the pool."""
    if not config.enable_eplb or model.moe is None:
        return None
    rank, order = transport.rank, model.moe_layers
    pool = Pool(
        places=placements[order[0]].slots_per_rank,
        blob_bytes=max(bank.blob_bytes for bank in banks.values()),
        limit=config.eplb_bytes_per_step,
        device=load.counts_YE.device,
    )
    return Rebalancer(
        [expert_layer(banks[layer], tables[layer], rank=rank, node_size=node_size) for layer in order],
        [placements[layer] for layer in order],
        load=load,
        planner=planner_of(config, model.moe),
        pool=pool,
        transport=transport,
        window=config.eplb_window,
        interval=config.eplb_interval,
        min_gain=config.eplb_min_gain,
        speeds=Speeds(ranks=config.eplb_wire_gbps * _GB, checkpoint=config.eplb_checkpoint_gbps * _GB),
        node_size=node_size,
        fetch=checkpoint_fetch(source, model, banks) if config.eplb_checkpoint_gbps else None,
    )


def expert_layer(bank: ExpertBank, table: PlacementTable, *, rank: int, node_size: int) -> ExpertLayer:
    """What a migration rewrites in place: the slots, and the map that this rank's tokens are looked up in."""

    def show(placement: ExpertPlacement) -> None:
        table.write(placement.table(table.slots_EX.device, rank=rank, node_size=node_size, width=table.max_copies))

    return ExpertLayer(bank=bank, show=show)


def checkpoint_fetch(source: TensorSource, model: ModelConfig, banks: Mapping[int, ExpertBank]) -> Fetch:
    """Reads one expert as it was read at the start, in the format of its layer's bank."""
    moe = model.moe
    assert moe is not None, "a dense model has no experts"

    def fetch(index: int, expert: int, out_B: Tensor) -> None:
        layer = model.moe_layers[index]
        like = banks[layer]
        source.verify(expert_tensors(model, layer, expert))
        places = Places(own_memory("cpu"))
        if like.scales is not None:
            bank = lay_out_fp8_bank(places, moe, layer, [expert])
        else:
            bank = lay_out_bank(places, moe, layer, [expert], dtype=like.down_LDF.dtype)
        source.read(places.wanted)
        out_B.copy_(bank.blob(0))

    return fetch


def _refuse_without_experts(config: EplbConfig) -> None:
    for name in ("enable_eplb", "num_redundant_experts", "init_placement", "record_routing"):
        value = getattr(config, name)
        if value:
            raise ValueError(f"{name} is {value!r}; the model has no routed experts, so leave it out")
