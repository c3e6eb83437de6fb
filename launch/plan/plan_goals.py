"""The deployment that serves a goal best, and the arithmetic that leads to it, line by line.

Knows how it is found and said; what a deployment does is `runtime.planning.deployments`'s to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from runtime.costs.device_costs import DeviceCosts, read_device_costs
from runtime.costs.roofline import CostShape
from runtime.model.model_config import read_model_config
from runtime.planning.deployments import (
    BATCHES,
    Point,
    Site,
    best,
    config_of,
    group_sizes,
    meets,
    pareto,
    plan_of,
    points,
)
from runtime.planning.goals import Goals
from runtime.planning.published import Deployment, fit_efficiency, read_published
from runtime.settings.config import EngineConfig
from runtime.weights.memory import MemoryPlan, gib, pages_of

from ..command.models import PROFILES, find_hardware, find_model
from ..command.wide_table import print_table
from .plan_arithmetic import arithmetic
from .plan_deploy import command_lines
from .plan_situation import Situation
from .plan_warnings import warnings_of

MOST_ROWS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for. `ranks` and `batch` where they are not to be chosen."""

    site: Site
    goals: Goals
    efficiency_why: str
    model: str
    gpu: str
    ranks: int | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that fits, and the choice; or `refusals`, a sentence each, why there is none."""

    found: tuple[Point, ...]
    chosen: Point | None
    refusals: tuple[str, ...] = ()


def published_efficiency(costs: DeviceCosts) -> tuple[float, str]:
    """What deployments reach of modelled throughput, and why that is taken."""
    if costs.rates is not None:
        return 1.0, "this device was measured itself"
    if costs.tables is None:
        return 1.0, "peaks are a bound that nothing reaches"
    deployments, _ = read_published(PROFILES / "results" / "published.toml")
    return fit_efficiency(deployments, known), "what published deployments reach of such times"


def known(deployment: Deployment) -> tuple[DeviceCosts, CostShape]:
    """The device and model of a published figure, from the files of this checkout; latents in bfloat16."""
    costs = read_device_costs(find_hardware(deployment.device))
    return costs, CostShape.of(read_model_config(find_model(deployment.model)))


def find_answer(wish: Wish) -> Answer:
    """Try all there is. Raises ValueError for GPUs that no group can share."""
    site, goals = wish.site, wish.goals
    sizes = group_sizes(goals, site.model, asked=wish.ranks)
    if not sizes:
        raise ValueError(f"gpus is {goals.gpus}; no group of ranks can share them, e.g. {8 * max(goals.gpus // 8, 1)}")
    batches = BATCHES if wish.batch is None else (wish.batch,)
    found = tuple(points(site, goals, ranks=sizes, batches=batches))
    if not found:
        return Answer(found=(), chosen=None, refusals=tuple(_misfits(wish, sizes, batches[0])))
    good = [point for point in found if meets(point, goals)]
    if not good:
        return Answer(found=found, chosen=None, refusals=(_too_slow(found, goals),))
    return Answer(found=found, chosen=best(good))


def tell_answer(wish: Wish, answer: Answer, *, as_json: bool, saved: Path | None, report: Path | None) -> None:
    """On standard output the answer; warnings and refusals beside it."""
    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    warnings = _warnings(wish, answer.chosen)
    if as_json:
        print(json.dumps(record(wish, answer, warnings)))
    else:
        _tell_text(out, wish, answer, saved=saved)
    if saved is not None and answer.chosen is not None:
        notes.print(f"deployment written to {saved}", markup=False)
    if report is not None and answer.found:
        notes.print(f"report written to {report}", markup=False)
    for warning in warnings:
        notes.print(f"warning: {warning}", markup=False)
    for refusal in answer.refusals:
        notes.print(f"serried: {refusal}", markup=False)


def record(wish: Wish, answer: Answer, warnings: Sequence[str]) -> dict[str, Any]:
    """The answer for a program."""
    return {
        "model": wish.model,
        "gpu": wish.gpu,
        "gpus": wish.goals.gpus,
        "context": wish.goals.context,
        "efficiency": round(wish.site.efficiency, 4),
        "feasible": answer.chosen is not None,
        "chosen": None if answer.chosen is None else point_record(answer.chosen),
        "pareto": [point_record(point) for point in pareto(answer.found)],
        "warnings": list(warnings),
        "refusals": list(answer.refusals),
    }


def point_record(point: Point) -> dict[str, Any]:
    """One deployment for a program."""
    return {
        "ranks": point.config.ranks,
        "batch": point.batch,
        "tracks": point.tracks,
        "num_redundant_experts": point.config.eplb.num_redundant_experts,
        "prefill_schedule_interval": point.interval,
        "decode_ms": round(point.decode_ms, 3),
        "tpot_ms": round(point.tpot_ms, 3),
        "ttft_ms": round(point.ttft_ms, 1),
        "tokens_per_s_per_gpu": round(point.tokens_per_gpu, 1),
        "tokens_per_s_per_user": round(point.tokens_per_user, 2),
        "cached_requests": point.plan.concurrent_requests(point.plan.numbers.max_model_len),
    }


def pareto_table(found: Sequence[Point], chosen: Point | None) -> Table:
    """What no other deployment beats in both; of many, some."""
    front = pareto(found)
    thin = -(-len(front) // MOST_ROWS) or 1
    shown = [point for place, point in enumerate(front) if place % thin == 0 or point is chosen or point is front[-1]]
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("ranks", "batch", "parts", "copies", "beat", "TPOT ms", "TTFT ms", "a user", "a GPU"):
        table.add_column(f"  {name}", justify="right")
    table.add_column("")
    for point in shown:
        sizes = point.config.ranks, point.batch, point.tracks, point.config.eplb.num_redundant_experts, point.interval
        times = f"{point.tpot_ms:.1f}", f"{point.ttft_ms:,.0f}", f"{point.tokens_per_user:.1f}"
        table.add_row(
            *[str(size) for size in sizes], *times, f"{point.tokens_per_gpu:,.0f}", " <-" if point is chosen else ""
        )
    return table


def _tell_text(out: Console, wish: Wish, answer: Answer, *, saved: Path | None) -> None:
    for line in arithmetic(wish.site, wish.goals, answer.chosen, why=wish.efficiency_why):
        out.print(line, markup=False)
    if answer.found:
        out.print("\nNothing that fits beats these in both tokens/s, a user and a GPU (of many, some):", markup=False)
        print_table(out, pareto_table(answer.found, answer.chosen))
    if answer.chosen is not None:
        for line in command_lines(wish.model, answer.chosen.config, wish.goals, profile=saved):
            out.print(line, markup=False)


def _warnings(wish: Wish, chosen: Point | None) -> list[str]:
    """Of the chosen deployment with everything else as it was asked for."""
    if chosen is None:
        return []
    situation = Situation.of(
        chosen.config,
        wish.site.model,
        wish.site.costs,
        plan=chosen.plan,
        context=wish.goals.context,
        on_gpu=wish.site.on_gpu,
        ttft_ms=wish.goals.ttft_ms,
    )
    return [*wish.site.model.warnings, *warnings_of(situation)]


def _misfits(wish: Wish, sizes: Sequence[int], batch: int) -> list[str]:
    """Why not even the smallest batch fits, for the largest group."""
    site, goals, ranks = wish.site, wish.goals, max(sizes)
    config = config_of(site, goals, ranks=ranks, batch=batch)
    plan = plan_of(site, config)
    if plan.shortfall_bytes and not _cache_bytes(plan):
        return [_shortfall(plan)]
    return [cache_misfit(goals, config, plan)]


def cache_misfit(goals: Goals, config: EngineConfig, plan: MemoryPlan) -> str:
    """The requests that were asked for, the bytes they need, and those that there are."""
    batch, numbers = config.scheduler.max_num_seqs, plan.numbers
    pages = pages_of(goals.context, numbers.page_size)
    needed = batch * pages * plan.page_bytes
    left = _cache_bytes(plan)
    fit = left // (pages * plan.page_bytes)
    return (
        f"{batch} requests of {goals.context:,} tokens do not fit on a rank of {config.ranks}: their latents take "
        f"{batch} x {pages} pages x {numbers.page_size} tokens x {plan.kv_bytes_per_token:,} B = {needed:,} B "
        f"({gib(needed)}), and "
        f"{gib(numbers.device_bytes)} x {numbers.gpu_memory_utilization:g} - weights {gib(plan.weights.total)} - "
        f"workspaces {gib(plan.workspaces.total)} leave {left:,} B ({gib(left)}): {fit} would fit"
    )


def _cache_bytes(plan: MemoryPlan) -> int:
    return max(plan.budget_bytes - plan.weights.total - plan.workspaces.total, 0)


def _shortfall(plan: MemoryPlan) -> str:
    try:
        plan.check_fits()
    except ValueError as error:
        return str(error)
    raise AssertionError("a plan with a shortfall fits")


def _too_slow(found: Sequence[Point], goals: Goals) -> str:
    quick = min(found, key=lambda point: (point.tpot_ms, point.ttft_ms))
    early = min(found, key=lambda point: (point.ttft_ms, point.tpot_ms))
    wanted = [
        f"{name} {goal:g} ms" for name, goal in (("TPOT", goals.tpot_ms), ("TTFT", goals.ttft_ms)) if goal is not None
    ]
    return (
        f"nothing that fits reaches {' with '.join(wanted)}: the shortest TPOT is {quick.tpot_ms:.1f} ms "
        f"({_named(quick)}), the shortest TTFT {early.ttft_ms:,.0f} ms ({_named(early)}); more GPUs, shorter "
        "requests or looser goals would"
    )


def _named(point: Point) -> str:
    return f"{point.config.ranks} ranks, {point.batch} request{'' if point.batch == 1 else 's'} each"
