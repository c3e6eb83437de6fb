"""What a model needs on each rank, and whether it fits: the plan of bytes, for people and programs.

The numbers are those of the engine's own memory plan, so what is said here is what `generate` would allocate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from runtime.costs.device_costs import read_device_costs
from runtime.model.model_config import ModelConfig, read_model_config
from runtime.model.model_shapes import ParameterCounts, parameter_counts
from runtime.settings.config import EngineConfig
from runtime.settings.memory_numbers import memory_numbers
from runtime.weights.hardware import Hardware
from runtime.weights.memory import MemoryPlan, plan_lines, plan_memory

from ..command.models import find_hardware, find_model
from .plan_situation import Situation
from .plan_warnings import warnings_of

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer, before it is laid out."""

    model: ModelConfig
    device: Hardware
    parameters: ParameterCounts
    plan: MemoryPlan
    context: int
    warnings: tuple[str, ...] = ()
    """What makes no sense together, a sentence each."""
    misfits: tuple[str, ...] = ()
    """What does not fit, a sentence each; empty when all does."""

    @property
    def cached_requests(self) -> int:
        """Requests of this context whose latents a rank can hold at once."""
        return self.plan.concurrent_requests(self.context) if self.context <= self.plan.numbers.max_model_len else 0

    @property
    def running_requests(self) -> int:
        """Of those, the ones that may run at once."""
        return min(self.cached_requests, self.plan.numbers.max_num_seqs)


def make_report(
    engine: EngineConfig, *, gpu: str, context: int | None, tpot_ms: float | None, ttft_ms: float | None
) -> Report:
    """Read the model and the device and plan. Raises ValueError or OSError for what cannot be read or is not built."""
    model = read_model_config(find_model(engine.model))
    costs = read_device_costs(find_hardware(gpu))
    on_gpu = gpu != "cpu"
    numbers = memory_numbers(engine, model, device_bytes=costs.hardware.memory_bytes, on_gpu=on_gpu)
    plan = plan_memory(model, numbers)
    context = context or min(DEFAULT_CONTEXT, plan.numbers.max_model_len)
    misfits = tuple(_misfits(plan, model, context))
    situation = None
    if not misfits:
        situation = Situation.of(
            engine, model, costs, plan=plan, context=context, on_gpu=on_gpu, tpot_ms=tpot_ms, ttft_ms=ttft_ms
        )
    return Report(
        model=model,
        device=costs.hardware,
        parameters=parameter_counts(model),
        plan=plan,
        context=context,
        warnings=tuple(warnings_of(situation)) if situation is not None else (),
        misfits=misfits,
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
        "warnings": list(report.warnings),
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


def tell_warnings(report: Report, notes: Console) -> None:
    """A line for each thing that makes no sense together, and for each that does not fit."""
    for warning in report.warnings:
        notes.print(f"warning: {warning}", markup=False)
    for misfit in report.misfits:
        notes.print(f"serried: {misfit}", markup=False)
