"""What a rank's slice came to, in words: settings, a table of stages, one of groups, and the last line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.table import Table

from runtime.bench.rank_slice import RankSlice, SliceTimes
from runtime.bench.rank_slice_costs import (
    LayerTimes,
    Throughput,
)
from runtime.bench.stages import HEAD, STAND_IN
from runtime.weights.hardware import Hardware

from .bench import commit, machine_line

QUESTION = "How long does one rank of {ep} take for a decode step, part by part, and how many tokens a second is that?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured of a slice, and made of it; microseconds."""

    stages: Mapping[str, float]
    roofs: Mapping[str, float]
    published: Mapping[str, float]
    full: LayerTimes
    times: SliceTimes
    groups: Sequence[Throughput]


def head_lines(rank_slice: RankSlice, hardware: Hardware) -> list[str]:
    """The question and what it takes to judge the answer."""
    config, settled = rank_slice.config, rank_slice.settled
    device = torch.cuda.get_device_name() if config.device == "cuda" else "cpu"
    return [
        QUESTION.format(ep=config.ranks),
        machine_line(),
        f"device    {device}; compared with {hardware.name}",
        f"commit    {commit()}",
        f"settings  {config.model}, EP{config.ranks}, batch {config.batch}, context {config.first_position}, "
        f"{settled.dtype}, ops {settled.config.ops}, {config.steps} steps of each kind",
        f"routing   {config.routing}, experts {config.placing}, {config.redundant} redundant; rank {rank_slice.rank} "
        f"computes {rank_slice.imbalance:.2f} times the mean; its own tokens go where its random router sends them",
        f"exchange  {rank_slice.exchange_why}",
    ]


def stage_table(outcome: Outcome) -> Table:
    """A line for each stage of a MoE layer, then what comes once a step."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("us, median", "measured", "roofline", "reached", "published")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    stages = dict(outcome.stages)
    once = [stage for stage in stages if stage in (HEAD, "sampler", "plan of attention")]
    for stage in [*[each for each in stages if each not in once], *once]:
        if once and stage == once[0]:
            table.add_section()
        us, roof = stages[stage], outcome.roofs.get(stage)
        reached = f"{100 * roof / us:.0f}%" if roof is not None and us > 0 else ""
        published = outcome.published.get(stage)
        table.add_row(stage, f"{us:.1f}", _number(roof), reached, _number(published))
    table.add_section()
    table.add_row("a layer with experts", f"{outcome.full.moe_us:.1f}", _layer_roof(outcome), "", "")
    table.add_row("the step, all layers", f"{outcome.full.step_us:.0f}", "", "", "")
    return table


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _layer_roof(outcome: Outcome) -> str:
    return f"{sum(us for stage, us in outcome.roofs.items() if stage not in (HEAD, 'sampler')):.1f}"


def group_table(outcome: Outcome) -> Table:
    """A line for each way of counting the wire."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = (
        "the wire, modelled",
        "us a layer",
        "in turns, ms",
        "tokens/s a GPU",
        "overlapped, ms",
        "tokens/s a GPU ",
    )
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for group in outcome.groups:
        late = group.overlapped_us
        table.add_row(
            group.what,
            f"{group.wire_us:.1f}",
            f"{group.in_turns_us / 1000:.2f}",
            f"{group.in_turns:.0f}",
            "" if late is None else f"{late / 1000:.2f}",
            "" if group.overlapped is None else f"{group.overlapped:.0f}",
        )
    return table


def summary(rank_slice: RankSlice, outcome: Outcome) -> dict[str, object]:
    """The last line."""
    return {
        "commit": commit(),
        "settings": asdict(rank_slice.config),
        "rank": rank_slice.rank,
        "imbalance": round(rank_slice.imbalance, 4),
        "measured_us": {stage: round(us, 2) for stage, us in outcome.stages.items()},
        "roofline_us": {stage: round(us, 2) for stage, us in outcome.roofs.items()},
        "published_us": {stage: round(us, 2) for stage, us in outcome.published.items()},
        "stand_in_us": round(outcome.stages.get(STAND_IN, 0.0), 2),
        "moe_layer_us": round(outcome.full.moe_us, 2),
        "dense_layer_us": round(outcome.full.dense_us, 2),
        "step_us": round(outcome.full.step_us, 1),
        "step_with_stand_in_us": round(outcome.times.step_us, 1),
        "sent_bytes": outcome.times.sent._asdict(),
        "groups": [
            asdict(group) | {"tokens_per_s": group.in_turns, "overlapped_tokens_per_s": group.overlapped}
            for group in outcome.groups
        ],
    }
