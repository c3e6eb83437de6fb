"""`serried bench rank-slice`: what one rank of a wide group takes for a step, measured alone on one device.

Prints the question, the machine, the commit, the settings, then tables, then one last line of JSON. Knows how it is
said; what is measured is `runtime.bench.rank_slice`, what is made of it `runtime.bench.rank_slice_costs`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from dbo import DboConfig
from runtime.bench.rank_slice import RankSlice
from runtime.bench.rank_slice_costs import (
    Work,
    compute_times,
    fitting_tables,
    published_us,
    roofs_us,
    stage_times,
    table_wire_us,
    throughput,
    wire_us,
)
from runtime.bench.slice_config import SliceConfig
from runtime.costs.cost_tables import CostTables, read_cost_tables
from runtime.costs.roofline import CostShape
from runtime.model.model_config import read_model_config
from runtime.scheduling.overlap import comm_share
from runtime.settings.config import KvCacheDType
from runtime.weights.hardware import Hardware, read_hardware

from ..command.models import find_hardware, find_model
from ..command.wide_table import print_table
from ..groups.refusal import refusals
from .slice_report import Outcome, group_table, head_lines, stage_table, summary

ABOUT = """\
Measure one rank's share of a wide group on one device, the other ranks stood in for, and say what the group would do.

Examples:
  serried bench rank-slice --model deepseek-v3 --ep 32 --batch 128 --context 2048
  serried bench rank-slice --model kimi-k2 --ep 32 --layers 6 --routing power-law --placing placed
  serried bench rank-slice --model tiny-v3 --ep 8 --batch 16 --context 128 --device cpu --gpu cpu

The rank's model, exchange, cache and sampler are the engine's, with random weights; what others would send it lies
ready and is copied to where it would land. Times are measured, and what travels is modelled: each line says which.
"""

DONE = 0
USUAL_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSliceFlags:
    """What `serried bench rank-slice` is told."""

    model: str = "deepseek-v3"
    """Folder, config.json or name of the model; its weights are random."""

    ep: int = 32
    """Ranks that share the experts, of which one is measured."""

    batch: int = 128
    """Requests that decode on every rank."""

    context: int | None = None
    """Tokens that each has in the cache, rounded up to whole pages; unset: 2048, or what the model's length leaves."""

    layers: int | None = None
    """Layers that are built, the others count like these; unset: all."""

    routing: str = "uniform"
    """Where tokens go: uniform, power-law, or a file of --record-routing."""

    skew: float = 1.0
    """Power of --routing power-law: the nth expert is asked for n to the minus so often."""

    placing: Literal["balanced", "placed"] = "balanced"
    """Where experts sit: planned for that routing, or in order."""

    num_redundant_experts: int = 0
    """Slots beyond one for each expert, in each layer, over all ranks."""

    rank: int | None = None
    """Which rank is measured; unset: the one whose experts get most rows."""

    node_size: int = 8
    """Ranks of one node."""

    hierarchical: Literal["auto", "on", "off"] = "auto"
    """Whether a token travels once to each node, and inside the node from there."""

    dispatch_dtype: Literal["run", "fp8"] = "fp8"
    """Number format of rows on their way to the experts."""

    kv_cache_dtype: KvCacheDType = "auto"
    """Number format of the latent cache, as in generate."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Where it runs; on a CPU the numbers say nothing of a GPU."""

    ops: Literal["auto", "reference", "triton"] = "auto"
    """Whose kernels, as in generate."""

    gpu: str = "h200"
    """Device of each rank, whose peaks and tables are compared with: a name in profiles/hardware."""

    steps: int = 20
    """Steps measured, of each kind and batch."""

    seed: int = 0
    """Of weights, tokens and routing."""

    def slice_config(self) -> SliceConfig:
        """Raises ValueError for what makes no sense, and for names that there are not."""
        return SliceConfig(
            model=str(find_model(self.model)),
            ranks=self.ep,
            batch=self.batch,
            context=USUAL_CONTEXT if self.context is None else self.context,
            layers=self.layers,
            routing=self.routing,
            skew=self.skew,
            placing=self.placing,
            redundant=self.num_redundant_experts,
            rank=self.rank,
            node_size=self.node_size,
            hierarchical=self.hierarchical,
            dispatch_dtype=self.dispatch_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            ops=self.ops,
            hardware=str(find_hardware(self.gpu)),
            steps=self.steps,
            seed=self.seed,
        )


def run(flags: RankSliceFlags) -> int:
    """Measure and print; returns 0. Raises Refusal for what cannot be run on this device."""
    torch.set_num_threads(1)
    with refusals():
        if flags.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch sees no CUDA device; give --device cpu and a small model")
        config = flags.slice_config()
        if flags.context is None:
            config = config.fitted(read_model_config(Path(config.model)))
        hardware = read_hardware(config.hardware)
        rank_slice = RankSlice(config)
    outcome = conclude(rank_slice, hardware, tables_of(config.hardware))
    tell(rank_slice, hardware, outcome)
    return DONE


def tables_of(path: str) -> CostTables | None:
    """Those of the device, if anybody measured any."""
    try:
        return read_cost_tables(path)
    except ValueError:
        return None


def conclude(rank_slice: RankSlice, hardware: Hardware, tables: CostTables | None) -> Outcome:
    """Measure the whole batch and half of it, and put both to the costs."""
    config, model, whole = rank_slice.config, rank_slice.model, rank_slice.whole_model
    layers, all_layers = [(each.num_dense_layers, len(each.moe_layers)) for each in (model, whole)]
    shape = CostShape.of(whole, fp8_cache=rank_slice.settled.cache_row.fp8)
    work = Work(
        shape=shape,
        batch=config.batch,
        context=config.first_position,
        pairs=float(rank_slice.pairs_YR[:, rank_slice.rank].mean()),
        slots=rank_slice.settled.plan.slots_per_rank,
        ranks=config.ranks,
        row_bytes=rank_slice.blueprint.row.num_bytes,
    )
    times = rank_slice.measure(config.batch)
    full = compute_times(times, built=layers, whole=all_layers)
    half_times = rank_slice.measure(config.batch // 2) if config.batch > 1 else None
    half = compute_times(half_times, built=layers, whole=all_layers) if half_times else None
    hierarchical = rank_slice.settled.config.exchange.hierarchical == "on"
    wires = [
        wire_us(each.sent, hardware, moe_layers=layers[1], hierarchical=hierarchical) if each else 0.0
        for each in (times, half_times)
    ]
    common = {"batch": config.batch, "moe_layers": all_layers[1], "full": full, "half": half}
    groups = [
        throughput(
            "as built", wire_us=wires[0], half_wire_us=wires[1], comm_share=comm_share(DboConfig(), hardware), **common
        )
    ]
    fitting = fitting_tables(tables, shape)
    if fitting is not None and config.ranks > 1:
        table = [table_wire_us(fitting, ranks=config.ranks, batch=size) for size in (config.batch, config.batch // 2)]
        groups.append(throughput("DeepEP-class table", wire_us=table[0], half_wire_us=table[1], **common))
    return Outcome(
        stages=stage_times(times.intervals, built=layers),
        roofs=roofs_us(work, hardware),
        published=published_us(work, fitting),
        full=full,
        times=times,
        groups=groups,
    )


def tell(rank_slice: RankSlice, hardware: Hardware, outcome: Outcome) -> None:
    """Print what was asked, where, with which settings, and what came out."""
    out = Console(highlight=False, soft_wrap=True)
    for line in head_lines(rank_slice, hardware):
        out.print(line, markup=False)
    print_table(out, stage_table(outcome))
    print_table(out, group_table(outcome))
    out.print(
        "step and parts: measured on this device; wire: modelled (as built: the bytes really sent over the links' "
        "peaks,\nwithout latency; table: published times of other kernels). Layers with experts: "
        f"{len(rank_slice.whole_model.moe_layers)}, of which {len(rank_slice.model.moe_layers)} were built.",
        markup=False,
    )
    print(json.dumps(summary(rank_slice, outcome)))
