"""What a rank's slice should take, and what a group of such ranks would do: rooflines, published times, speed.

    step     measured, without what stands in for the wire; layers that were not built count as those that were
    wire     modelled: the bytes that were really put on it over the links' peaks, no latency; or a published table
    in turns        step + layers x wire
    overlapped      each layer takes the longer of its two halves' compute and their wire (`costs`)

Pure arithmetic on what `rank_slice` measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ep import ExchangeBytes

from ..costs.cost_tables import CostTables
from ..costs.measured import MeasuredOperations
from ..costs.roofline import CostShape
from ..costs.traffic import Traffic
from ..weights.hardware import Hardware
from .rank_slice import SliceTimes
from .stages import HEAD, LAYER_BEGINS, PROJECTIONS, STAND_IN, Interval, by_stage

_US = 1e6
_BF16, _FP32 = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one MoE layer of the slice has to do in a step, and the head after the last.

    pairs       (token, expert) pairs that this rank's experts compute
    slots       experts that it holds
    ranks       that tokens are spread over
    row_bytes   of a row on its way there
    """

    shape: CostShape
    batch: int
    context: float
    pairs: float
    slots: int
    ranks: int
    row_bytes: int


def roofs_us(work: Work, hardware: Hardware) -> dict[str, float]:
    """The least that a stage can take at the device's peaks: the longer of its arithmetic and its bytes. Of one MoE
    layer; head and sampler once a step. Matrices count in the format in which the checkpoint stores them."""
    shape, batch = work.shape, work.batch
    narrow = 1 if shape.fp8 else _BF16
    fast = hardware.fp8_flops if shape.fp8 and hardware.fp8_flops else hardware.bf16_flops
    slow = hardware.bf16_flops
    core = 2 * shape.heads * (2 * shape.latent + shape.rope) * batch * work.context
    latents = shape.cache_bytes * batch * work.context
    traffic = Traffic(ranks=work.ranks, node_size=work.ranks, experts=shape.experts, top_k=shape.top_k)
    rows = batch * traffic.dispatch_rows * work.ranks
    vector = _BF16 * shape.hidden
    least = {
        PROJECTIONS: (2 * shape.projections * batch / fast, narrow * shape.projections),
        "norms": (0.0, batch * (6 * vector + 2 * _BF16 * (shape.q_rank or 0))),
        LAYER_BEGINS: (0.0, 2 * _BF16 * batch * (shape.latent + shape.rope + shape.heads * shape.rope)),
        "attention core": (
            (core + 2 * shape.absorbed * batch) / slow,
            latents + _BF16 * shape.absorbed,
        ),
        "router": (2 * shape.hidden * shape.experts * batch / slow, _FP32 * shape.hidden * shape.experts),
        "pack rows": (0.0, batch * vector + rows * work.row_bytes),
        "shared expert": (
            2 * shape.shared_experts * shape.expert * batch / fast,
            narrow * shape.shared_experts * shape.expert,
        ),
        "routed experts": (2 * work.pairs * shape.expert / fast, narrow * work.slots * shape.expert),
        "add rows up": (0.0, (work.pairs + 2 * rows + batch) * vector),
        HEAD: (2 * shape.vocab * shape.hidden * batch / slow, _BF16 * shape.vocab * shape.hidden),
        "sampler": (0.0, _FP32 * shape.vocab * batch),
    }
    return {
        stage: max(flops_s, num_bytes / hardware.memory_bytes_per_s) * _US
        for stage, (flops_s, num_bytes) in least.items()
    }


def published_us(work: Work, tables: CostTables | None) -> dict[str, float]:
    """What published kernels take, by stage, where tables of this model on this device were measured.

    Their projections hold the absorption, which the slice counts to the core; their shared expert holds the router.
    """
    if tables is None:
        return {}
    tokens_of_pairs = work.pairs / (work.shape.top_k or 1)
    return {
        PROJECTIONS: tables.projections_us.at(work.batch),
        "attention core": tables.core_us.at(work.batch, work.context),
        "shared expert": tables.shared_us.at(work.batch),
        "routed experts": tables.routed_us.at(work.slots, tokens_of_pairs),
        HEAD: tables.head_us,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What the slice computes, microseconds: one layer of either kind, and a whole step of the whole model."""

    moe_us: float
    dense_us: float
    step_us: float


def compute_times(times: SliceTimes, *, built: tuple[int, int], whole: tuple[int, int]) -> LayerTimes:
    """Without what stands in for the wire. `built` and `whole` are (dense layers, MoE layers).

    A layer's time goes from its append to the next one's; the last layer has no next one, and counts in the step only.
    Marks cost something, too: parts are scaled to the step that was not marked.
    """
    own = [each for each in times.intervals if each.stage != STAND_IN]
    marked_us = sum(each.us for each in times.intervals)
    scale = times.step_us / marked_us
    layers = [scale * sum(by_stage(own, range(layer, layer + 1)).values()) for layer in range(sum(built))]
    dense, moe = layers[: built[0]], layers[built[0] : -1]
    dense_us = statistics.median(dense) if dense else 0.0
    moe_us = statistics.median(moe)
    step_us = scale * sum(each.us for each in own)
    step_us += (whole[0] - built[0]) * dense_us + (whole[1] - built[1]) * moe_us
    return LayerTimes(moe_us=moe_us, dense_us=dense_us, step_us=step_us)


def stage_times(intervals: tuple[Interval, ...], *, built: tuple[int, int]) -> dict[str, float]:
    """Of one MoE layer, the median over those that were measured whole; of head and sampler, and of what comes once a
    step, all of it."""
    layers = range(built[0], sum(built) - 1)
    parts = [by_stage(intervals, range(layer, layer + 1)) for layer in layers]
    found = {stage: statistics.median([part.get(stage, 0.0) for part in parts]) for stage in parts[0]}
    once = by_stage([each for each in intervals if each.stage not in found])
    return found | once


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A group of such ranks. `wire_us` is a layer's; None: not measured in halves, so nothing to overlap with."""

    what: str
    wire_us: float
    in_turns_us: float
    overlapped_us: float | None
    batch: int

    @property
    def in_turns(self) -> float:
        """Tokens a second and GPU."""
        return self.batch / self.in_turns_us * _US

    @property
    def overlapped(self) -> float | None:
        """The same with two tracks."""
        return None if self.overlapped_us is None else self.batch / self.overlapped_us * _US


def throughput(
    what: str,
    *,
    batch: int,
    moe_layers: int,
    full: LayerTimes,
    wire_us: float,
    half: LayerTimes | None = None,
    half_wire_us: float = 0.0,
    comm_share: float = 0.0,
) -> Throughput:
    """From a layer's compute and its wire; `half` is of half the batch, `comm_share` what the wire takes of the device
    while kernels run."""
    overlapped_us = None
    if half is not None:
        wire, compute = 2 * half_wire_us, 2 * half.moe_us
        layer_us = max(compute + comm_share * wire, wire)
        overlapped_us = full.step_us + moe_layers * (layer_us - full.moe_us)
    return Throughput(
        what=what,
        wire_us=wire_us,
        in_turns_us=full.step_us + moe_layers * wire_us,
        overlapped_us=overlapped_us,
        batch=batch,
    )


def wire_us(sent: ExchangeBytes, hardware: Hardware, *, moe_layers: int, hierarchical: bool) -> float:
    """One layer's bytes as they were put on the wire, over the peaks of the links: of the two, the longer; one after
    the other where rows are handed on inside the node."""
    near = hardware.link_bytes_per_s or hardware.memory_bytes_per_s
    far = hardware.network_bytes_per_s or near
    parts = [sent.node / moe_layers / near * _US, sent.network / moe_layers / far * _US]
    return sum(parts) if hierarchical else max(parts)


def table_wire_us(tables: CostTables, *, ranks: int, batch: int) -> float:
    """One layer of published all-to-all kernels, which send a row for each token and expert."""
    return MeasuredOperations(tables=tables, ranks=ranks, rows_per="experts").exchange_us(batch)


def fitting_tables(tables: CostTables | None, shape: CostShape) -> CostTables | None:
    """The tables, if they are of this model."""
    if tables is None:
        return None
    try:
        tables.check_model(
            experts=shape.experts, top_k=shape.top_k, moe_layers=shape.moe_layers, dense_layers=shape.dense_layers
        )
    except ValueError:
        return None
    return tables
