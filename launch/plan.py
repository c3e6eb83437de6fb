"""`serried plan`: what a model needs on each rank, and whether it fits, from its configuration alone.

Loads no weights and asks no device: a folder, a config.json or a name is enough. The numbers are those of the engine's
own memory plan, so what is said here is what `generate` would allocate.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.console import Console

from runtime.config import EngineConfig
from runtime.hardware import Hardware, read_hardware
from runtime.memory import MemoryPlan, plan_lines, plan_memory
from runtime.model_config import ModelConfig, read_model_config
from runtime.model_shapes import ParameterCounts, parameter_counts
from runtime.settling import memory_numbers

from .models import find_hardware, find_model
from .refusal import refusals

ABOUT = """\
Say what a model needs on each rank, and whether it fits, without loading it.

Examples:
  serried plan deepseek-v3 --ranks 32
  serried plan deepseek-v2-lite --ranks 1 --gpu h200 --context 32768
  serried plan FOLDER/config.json --ranks 8 --max-num-seqs 128 --json

The exit code is 1, and the last line says why, when it does not fit.
"""

DONE, FAILED = 0, 1
DEFAULT_CONTEXT = 4096

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """What `serried plan` is told."""

    engine: tyro.conf.OmitArgPrefixes[EngineConfig]

    gpu: str = "h200"
    """Device of each rank: a name in profiles/hardware."""

    context: int | None = None
    """Prompt and output of one request, in tokens; unset: 4096, or the model's longest. Said is how many fit."""

    json: Switch = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise ValueError(f"context is {self.context}; it must be at least 1, e.g. 4096")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer, before it is laid out."""

    model: ModelConfig
    device: Hardware
    parameters: ParameterCounts
    plan: MemoryPlan
    context: int
    misfits: tuple[str, ...] = field(default=())
    """What does not fit, a sentence each; empty when all does."""

    @property
    def cached_requests(self) -> int:
        """Requests of this context whose latents a rank can hold at once."""
        return self.plan.concurrent_requests(self.context) if self.context <= self.plan.numbers.max_model_len else 0

    @property
    def running_requests(self) -> int:
        """Of those, the ones that may run at once."""
        return min(self.cached_requests, self.plan.numbers.max_num_seqs)


def run(flags: PlanFlags) -> int:
    """Print the plan; returns 0 when it fits and 1 when not. Raises Refusal for a model or device that is not known."""
    with refusals():
        report = make_report(flags)
    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    for warning in report.model.warnings:
        notes.print(f"note: {warning}", markup=False)
    if flags.json:
        print(json.dumps(record(report)))
    else:
        for line in lines(report):
            out.print(line, markup=False)
    for misfit in report.misfits:
        notes.print(f"serried: {misfit}", markup=False)
    return FAILED if report.misfits else DONE


def make_report(flags: PlanFlags) -> Report:
    """Read the model and the device and plan. Raises ValueError or OSError for what cannot be read or is not built."""
    model = read_model_config(find_model(flags.engine.model))
    device = read_hardware(find_hardware(flags.gpu))
    on_gpu = flags.gpu != "cpu"
    numbers = memory_numbers(flags.engine, model, device_bytes=device.memory_bytes, on_gpu=on_gpu)
    plan = plan_memory(model, numbers)
    context = flags.context or min(DEFAULT_CONTEXT, plan.numbers.max_model_len)
    return Report(
        model=model,
        device=device,
        parameters=parameter_counts(model),
        plan=plan,
        context=context,
        misfits=tuple(_misfits(plan, model, context)),
    )


def _misfits(plan: MemoryPlan, model: ModelConfig, context: int) -> list[str]:
    try:
        plan.check_fits()
    except ValueError as error:
        return [str(error)]
    if context > model.max_position:
        return [f"a context of {context:,} tokens is longer than the model's {model.max_position:,}"]
    if context > plan.numbers.max_model_len:
        return [f"a context of {context:,} tokens is longer than --max-model-len {plan.numbers.max_model_len:,}"]
    if not plan.concurrent_requests(context):
        pages = plan.num_pages * plan.numbers.page_size
        return [f"not one request of {context:,} tokens fits: the cache of a rank holds {pages:,} tokens"]
    return []


def lines(report: Report) -> list[str]:
    """The report for a person."""
    model, plan, counts = report.model, report.plan, report.parameters
    ranks = plan.numbers.ranks
    return [
        _describe(model),
        f"parameters            {_billions(counts.main)}, {_billions(counts.active)} active a token",
        f"  MTP, apart          {_mtp(model, counts)}",
        f"ranks                 {ranks} x {report.device.name}",
        *plan_lines(plan, contexts=()),
        f"requests of {report.context:<9,} {report.cached_requests:,} a rank by the cache, "
        f"{plan.numbers.max_num_seqs:,} by --max-num-seqs: {report.running_requests * ranks:,} in all",
    ]


def record(report: Report) -> dict[str, Any]:
    """The report for a program; bytes are of one rank."""
    plan, parameters = report.plan, report.parameters
    return {
        "model_type": report.model.model_type,
        "ranks": plan.numbers.ranks,
        "device": report.device.name,
        "parameters": {"main": parameters.main, "active": parameters.active, "mtp": parameters.mtp},
        "weight_bytes": asdict(plan.weights) | {"total": plan.weights.total},
        "workspace_bytes": asdict(plan.workspaces) | {"total": plan.workspaces.total},
        "slots_per_rank": plan.slots_per_rank,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "cache_bytes": plan.cache_bytes,
        "num_pages": plan.num_pages,
        "page_size": plan.numbers.page_size,
        "context": report.context,
        "cached_requests": report.cached_requests,
        "running_requests": report.running_requests,
        "budget_bytes": plan.budget_bytes,
        "shortfall_bytes": plan.shortfall_bytes,
        "fits": not report.misfits,
        "misfits": list(report.misfits),
    }


def _describe(model: ModelConfig) -> str:
    dense = f"{model.num_dense_layers} of them dense" if model.num_dense_layers else "all with experts"
    text = f"{model.model_type:<21} {model.num_layers} layers, {dense}"
    if model.moe is None:
        return text
    return f"{text}; {model.moe.num_experts} experts, top {model.moe.top_k}, {model.moe.num_shared} shared"


def _mtp(model: ModelConfig, counts: ParameterCounts) -> str:
    layers = model.num_mtp_layers
    if not layers:
        return "none"
    return f"{_billions(counts.mtp)} in {layers} layer{'s' if layers > 1 else ''} for multi-token prediction, not run"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3f} billion"
