"""`serried plan`: what a model needs on each rank, and with --gpus what to run on them, from its configuration alone.

Loads no weights and asks no device: a folder, a config.json or a name is enough.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from runtime.costs.device_costs import read_device_costs
from runtime.model.model_config import read_model_config
from runtime.planning.deployments import Site
from runtime.planning.goals import Goals, Prefill
from runtime.settings.config import EngineConfig

from ..command.models import find_hardware, find_model
from ..groups.refusal import refusals
from .plan_deploy import write_deployment
from .plan_goals import Wish, find_answer, published_efficiency, tell_answer
from .plan_memory import DEFAULT_CONTEXT, lines, make_report, record, tell_warnings
from .plan_picture import write_picture

ABOUT = """\
Say what a model needs on each rank, and whether it fits, without loading it; with --gpus, what to run on them.

Examples:
  serried plan deepseek-v3 --gpus 32 --context 2048 --tpot-ms 50
  serried plan deepseek-v3 --gpus 32 --context 4096 --request-rate 50 --output-len 500 --save deploy.toml
  serried plan --from-vllm 'vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 32 --enable-expert-parallel'
  serried plan deepseek-v3 --ranks 32
  serried plan deepseek-v2-lite --ranks 1 --gpu h200 --context 32768
  serried plan FOLDER/config.json --ranks 8 --max-num-seqs 128 --json

The exit code is 1, and the last line says why, when it does not fit or no deployment reaches the goals.
"""

DONE, FAILED = 0, 1
NEED_GPUS = ("batch", "output_len", "request_rate", "efficiency", "save", "report")

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """What `serried plan` is told."""

    engine: tyro.conf.OmitArgPrefixes[EngineConfig]

    gpu: str = "h200"
    """Device of each rank: a name in profiles/hardware."""

    context: int | None = None
    """Prompt and output of one request, in tokens; unset: 4096, or the model's longest. Said is how many fit."""

    gpus: int | None = None
    """GPUs there are; with it, a deployment is recommended. --ranks, unless it is 1, is then the size of its groups,
    and --node-size the GPUs of a node, 8 unless said."""

    batch: int | None = None
    """Requests that a rank is to decode at once; unset: whatever is best. Refused with the bytes if they do not fit."""

    output_len: int | None = None
    """Tokens of --context that are output; unset: half of them."""

    tpot_ms: float | None = None
    """Goal: milliseconds between two tokens of a request, on average."""

    ttft_ms: float | None = None
    """Goal: milliseconds until a request's first token, on average."""

    request_rate: float | None = None
    """Requests a second that come, all together; unset: said is how many can."""

    prefill: Prefill = "here"
    """Whether prompts are computed on the same GPUs, or elsewhere."""

    efficiency: float | None = None
    """What a deployment reaches of the modelled throughput; unset: what published ones do, or 1 where this device was
    measured itself."""

    save: Path | None = None
    """File to write the deployment to, for --profile."""

    report: Path | None = None
    """File for a picture of what else could be run: .html, or .png with matplotlib."""

    json: Switch = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        for name, legal in (("context", 4096), ("gpus", 8), ("batch", 64)):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, e.g. {legal}")
        if self.efficiency is not None and not 0.0 < self.efficiency <= 1.0:
            raise ValueError(f"efficiency is {self.efficiency}; it must be above 0 and at most 1, e.g. 0.8")
        if self.report is not None and self.report.suffix not in (".html", ".png"):
            raise ValueError(f"report is {str(self.report)!r}; it must end with .html or .png, e.g. plan.html")
        asked = [f"--{name.replace('_', '-')}" for name in NEED_GPUS if getattr(self, name) is not None]
        if self.gpus is None and asked:
            raise ValueError(f"{asked[0]} is for a recommended deployment, which needs --gpus, e.g. --gpus 32")


def run(flags: PlanFlags) -> int:
    """Print the plan; returns 0 when it fits and 1 when not. Raises Refusal for a model or device that is not known."""
    if flags.gpus is not None:
        return recommend(flags)
    with refusals():
        report = make_report(
            flags.engine, gpu=flags.gpu, context=flags.context, tpot_ms=flags.tpot_ms, ttft_ms=flags.ttft_ms
        )
    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    for warning in report.model.warnings:
        notes.print(f"note: {warning}", markup=False)
    if flags.json:
        print(json.dumps(record(report)))
    else:
        for line in lines(report):
            out.print(line, markup=False)
    tell_warnings(report, notes)
    return FAILED if report.misfits else DONE


def recommend(flags: PlanFlags) -> int:
    """Print the deployment that serves the goals best, write it if asked; returns 0, or 1 when none does."""
    assert flags.gpus is not None
    with refusals():
        wish = make_wish(flags)
        answer = find_answer(wish)
        if answer.chosen is not None and flags.save is not None:
            write_deployment(flags.save, wish, answer.chosen)
        if answer.found and flags.report is not None:
            write_picture(flags.report, wish, answer)
    tell_answer(wish, answer, as_json=flags.json, saved=flags.save, report=flags.report)
    return DONE if answer.chosen is not None else FAILED


def make_wish(flags: PlanFlags) -> Wish:
    """What is asked for. Raises ValueError or OSError for what cannot be read or makes no sense."""
    assert flags.gpus is not None
    model, path = read_model_config(find_model(flags.engine.model)), find_hardware(flags.gpu)
    context = flags.context or min(DEFAULT_CONTEXT, model.max_position)
    if context > model.max_position:
        raise ValueError(f"context is {context}; the model allows at most {model.max_position}")
    goals = Goals(
        gpus=flags.gpus,
        context=context,
        output_len=flags.output_len or max(context // 2, 1),
        node_size=flags.engine.node_size or 8,
        tpot_ms=flags.tpot_ms,
        ttft_ms=flags.ttft_ms,
        request_rate=flags.request_rate,
        prefill=flags.prefill,
    )
    costs = read_device_costs(path)
    efficiency, why = (
        published_efficiency(costs) if flags.efficiency is None else (flags.efficiency, "as --efficiency says")
    )
    on_gpu = flags.gpu != "cpu"
    base = replace(flags.engine, hardware=str(path), ranks=1, device="cuda" if on_gpu else flags.engine.device)
    site = Site(model=model, costs=costs, base=base, on_gpu=on_gpu, efficiency=efficiency)
    asked = flags.engine.ranks if flags.engine.ranks > 1 else None
    return Wish(
        site=site,
        goals=goals,
        efficiency_why=why,
        model=flags.engine.model,
        gpu=flags.gpu,
        ranks=asked,
        batch=flags.batch,
    )
