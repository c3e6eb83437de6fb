"""`serried eplb`: what a recording of routing says about experts' loads, and what each placement policy makes of it.

Knows the command line; plans are the `eplb` room's, step times the cost model's, and how the answer is laid out is
`balance_report`'s. Nothing is moved and no model is loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from eplb import POLICIES, PlanConfig, RebalancePlan, Recording, check_plan, plan
from moe import ExpertPlacement, spread
from runtime.costs.cost_tables import read_cost_tables
from runtime.costs.costs import Operations, StepCosts, StepShape
from runtime.costs.measured import MeasuredOperations
from runtime.costs.roofline import CostShape, RooflineOperations
from runtime.loop.routing_record import routing_files
from runtime.model.model_config import ModelConfig, read_model_config
from runtime.weights.hardware import read_hardware
from runtime.weights.memory import expert_bytes

from ..command.models import find_hardware, find_model
from ..command.wide_table import print_table
from ..groups.refusal import refusals
from .balance_report import Answer, Report, headline, layer_table, record, summary_table
from .heat_map import LEGEND, heat_lines, save_png

ABOUT = """\
Show how unevenly experts are used in a recording, and what each placement policy would gain.

Examples:
  serried generate MODEL_FOLDER --prompts requests.jsonl --ranks 4 --record-routing routing
  serried eplb routing
  serried eplb routing --ranks 32 --num-redundant-experts 32 --model deepseek-v3 --png heat.png

Each rank wrote a file of its own, routing.0 and so on; they are added up. Balance is mean over max of the ranks' loads:
1 is level, and at 0.5 all wait half of the time for the fullest rank.
"""

DONE = 0
_LABEL_COLUMNS = 6

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbFlags:
    """What `serried eplb` is told."""

    report: tyro.conf.Positional[tuple[Path, ...]]
    """What --record-routing named, or some of the files that it wrote, one a rank."""

    ranks: int | None = None
    """Ranks to plan for; unset: as many as were recorded."""

    num_redundant_experts: int = 0
    """Copies beyond one of each expert, in each layer."""

    node_size: int = 0
    """Ranks on a node, for models whose routing is limited to groups; 0: all on one."""

    tokens_per_rank: float | None = None
    """Tokens that a rank brings to a step; unset: as many as were recorded. 0: averages only, no noise of steps."""

    model: str | None = None
    """Model of the recording, for bytes and step times: a folder, a config.json or a name in profiles/models; unset: as
    recorded."""

    gpu: str = "h200"
    """Device of each rank: a name in profiles/hardware."""

    context: int = 4096
    """Cached tokens of each request, for step times."""

    png: Path | None = None
    """File to write the heat map of experts and layers to; needs matplotlib."""

    json: Switch = False
    """End with one JSON object."""

    def __post_init__(self) -> None:
        if not self.report:
            raise ValueError("report names no file; give those that --record-routing wrote, e.g. routing")
        for name, least in (("ranks", 1), ("num_redundant_experts", 0), ("node_size", 0), ("context", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}, e.g. {max(least, 1)}")


def run(flags: EplbFlags) -> int:
    """Print the report; returns 0. Raises Refusal for files that are no recordings and numbers that make no sense."""
    out = Console(highlight=False, soft_wrap=True)
    with refusals():
        report = make_report(flags)
        if flags.png is not None:
            save_png(report.recording.loads_YE, flags.png, title=headline(report)[0])
    for line in headline(report):
        out.print(line, markup=False)
    out.print()
    for line in heat_lines(report.recording.loads_YE, columns=max(out.width, 80) - _LABEL_COLUMNS):
        out.print(line)
    out.print(LEGEND, markup=False)
    out.print()
    print_table(out, layer_table(report))
    print_table(out, summary_table(report))
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    if flags.json:
        print(json.dumps(record(report)))
    return DONE


def make_report(flags: EplbFlags) -> Report:
    """Read and plan. Raises ValueError or OSError for what cannot be read or makes no sense."""
    files = _files(flags.report)
    recording = Recording.total([Recording.read(path) for path in files])
    if recording.num_tokens == 0 or recording.num_layers == 0:
        raise ValueError(f"{flags.report[0]} holds no tokens; record a run that decodes some")
    model, notes = _model(flags, recording)
    num_ranks = flags.ranks or recording.num_ranks
    tokens = flags.tokens_per_rank
    if tokens is None:
        tokens = recording.num_tokens / recording.num_steps / len(files)
    config = PlanConfig(
        num_redundant=flags.num_redundant_experts,
        top_k=recording.top_k,
        node_size=flags.node_size,
        groups=_groups(model),
        tokens_per_rank=tokens,
        expert_bytes=expert_bytes(model, dtype_bytes=2, keep_fp8=True) if model is not None else 0,
    )
    start = [spread(recording.num_experts, num_ranks, config.num_redundant)] * recording.num_layers
    planned: list[tuple[str, RebalancePlan]] = []
    for name in POLICIES:
        asked = replace(config, policy=name)
        try:
            check_plan(asked, num_experts=recording.num_experts, num_ranks=num_ranks)
        except ValueError as error:
            if name == config.policy:
                raise
            notes.append(f"policy {name} is left out: {error}")
            continue
        planned.append((name, plan(recording.loads_YE, old=start, config=asked)))
    timed = _StepTimes(flags, model, num_ranks=num_ranks, tokens=tokens)
    first = planned[0][1]
    stay = replace(first, placements=tuple(start), layers=tuple(
        replace(layer, after=layer.before, moves=0, changed=False) for layer in first.layers
    ))  # fmt: skip
    return Report(
        recording=recording,
        model=model,
        num_ranks=num_ranks,
        tokens_per_rank=tokens,
        answers=tuple(_answer(name, each, recording, timed) for name, each in [("start", stay), *planned]),
        notes=(*notes, *timed.notes),
    )


def _files(names: Sequence[Path]) -> list[Path]:
    """The files of all ranks, each once: twice would double the load of its rank."""
    files = [path for name in names for path in routing_files(name)]
    twice = [path for path, times in Counter([path.resolve() for path in files]).items() if times > 1]
    if twice:
        raise ValueError(f"report names {twice[0]} twice; name each rank's file once, or what --record-routing named")
    return files


def _model(flags: EplbFlags, recording: Recording) -> tuple[ModelConfig | None, list[str]]:
    """The model that was named, or recorded; without one there are no bytes and no times."""
    if flags.model is None and not recording.model:
        return None, ["no model is named: give --model for bytes and step times"]
    try:
        model = read_model_config(find_model(flags.model or recording.model))
    except (ValueError, OSError) as error:
        if flags.model is not None:
            raise
        return None, [f"the recorded model cannot be found: give --model for bytes and step times ({error})"]
    has = (len(model.moe_layers), model.moe.num_experts, model.moe.top_k) if model.moe is not None else (0, 0, 0)
    recorded = (recording.num_layers, recording.num_experts, recording.top_k)
    if has != recorded:
        raise ValueError(
            f"model has {has[0]} MoE layers of {has[1]} experts, top {has[2]}; the recording has {recorded[0]} of "
            f"{recorded[1]}, top {recorded[2]}: name the model that was recorded"
        )
    return model, []


def _groups(model: ModelConfig | None) -> int:
    """Groups of experts that limit routing; 1 where nothing does, or nothing is known."""
    moe = model.moe if model is not None else None
    return moe.num_groups if moe is not None and moe.is_group_limited else 1


class _StepTimes:
    """Step times of a model on a device, by how uneven the experts' ranks are: from tables if there are any."""

    def __init__(self, flags: EplbFlags, model: ModelConfig | None, *, num_ranks: int, tokens: float) -> None:
        self.notes: tuple[str, ...] = ()
        self._make = None
        if model is None or model.moe is None or not tokens:
            return
        self._shape = StepShape(decode_tokens=round(tokens) or 1, context_len=flags.context)
        path, shape = find_hardware(flags.gpu), CostShape.of(model)
        hardware = read_hardware(path)
        where = f"{num_ranks} x {hardware.name}, {tokens:.0f} tokens a rank, {flags.context} cached each"
        try:
            tables = read_cost_tables(path)
            tables.check_model(
                experts=shape.experts, top_k=shape.top_k, moe_layers=shape.moe_layers, dense_layers=shape.dense_layers
            )
        except ValueError:
            self._make = lambda imbalance: RooflineOperations(
                shape=shape, hardware=hardware, ranks=num_ranks, imbalance=imbalance
            )
            self.notes = (f"step times: peaks of {where}; nothing was measured for this model",)
            return
        redundant = flags.num_redundant_experts
        self._make = lambda imbalance: MeasuredOperations(
            tables=tables, ranks=num_ranks, redundant=redundant, imbalance=imbalance
        )
        self.notes = (f"step times: tables of {tables.model}, {where}",)

    def ms(self, balance: float) -> float | None:
        """A step in which the experts of all layers are so balanced."""
        if self._make is None:
            return None
        operations: Operations = self._make(1.0 / balance)
        return StepCosts(operations).step_time([self._shape]).total_us / 1e3


def _answer(name: str, planned: RebalancePlan, recording: Recording, timed: _StepTimes) -> Answer:
    return Answer(
        name=name,
        balances=tuple(layer.after for layer in planned.layers),
        balance=planned.after,
        balance_steps=_balance_of_steps(recording, planned.placements),
        moves=planned.num_moves,
        num_bytes=planned.num_bytes,
        step_ms=timed.ms(planned.after),
    )


def _balance_of_steps(recording: Recording, placements: tuple[ExpertPlacement, ...]) -> float | None:
    """Sum of means over sum of maxima of the ranks' loads, over the recorded single steps, copies sharing evenly."""
    alone = (recording.steps_N == 1) & (recording.tokens_N > 0)
    if not alone.any():
        return None
    mean = largest = 0.0
    for layer, placement in enumerate(placements):
        slots = np.array(placement.slot_experts)
        copies = np.bincount(slots[slots >= 0], minlength=recording.num_experts)
        shares = recording.counts_NYE[alone, layer] / copies
        rows = np.where(slots >= 0, shares[:, slots], 0.0).reshape(len(shares), placement.num_ranks, -1).sum(axis=2)
        mean, largest = mean + rows.mean(axis=1).sum(), largest + rows.max(axis=1).sum()
    return mean / largest
