"""From a measured run to the figures of a benchmark, as they are saved: one flat dictionary with a few nested ones.

Keys are those of `vllm bench serve` where it has them. Knows runs, counters and the cost model; prints nothing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runtime import EngineConfig, EngineStats, RankStats
from runtime.bench.prediction import MeasuredStep, prediction_figures, use_figures
from runtime.bench.serving_metrics import serving_figures, steady_figures, steady_window, token_hash
from runtime.bench.step_summary import GroupStep, balancedness, expert_loads, group_steps, step_figures, timeline
from runtime.bench.workload import Workload
from runtime.costs.costs import Operations
from runtime.costs.device_costs import read_device_costs
from runtime.costs.roofline import CostShape
from runtime.requests.measures import RankMeasures
from runtime.settings.cost_group import group_of
from runtime.settings.decisions import full_step, run_dtype, settle_exchange
from runtime.weights.hardware import read_hardware

from .bench_run import Bench, Measured, environment, hardware_path

NOISE_REPEATS = 3
"""Runs from which their own spread is known well enough."""


def figures(bench: Bench, repeats: Sequence[Measured]) -> dict[str, Any]:
    """All figures of the median run (by output throughput), and the noise of all of them."""
    each = [run_figures(bench, measured) for measured in repeats]
    middle = sorted(each, key=lambda run: run["output_throughput"])[(len(each) - 1) // 2]
    return {
        **middle,
        "token_hash": token_hash(repeats[0].run.requests),
        "noise": noise(each, middle),
        "repeats": [{name: headline(run)[name] for name in HEADLINES} for run in each],
        "settings": settings(bench, repeats[0].offered),
        "environment": environment(),
    }


def run_figures(bench: Bench, measured: Measured) -> dict[str, Any]:
    """Of one run."""
    run = measured.run
    window = steady_window(run.requests)
    measures = measures_of(measured.after)
    begin_s, end_s = (window.begin_s, window.end_s) if window else (run.begin_s, run.end_s)
    steps = group_steps(measures, begin_s=begin_s, end_s=end_s)
    steps_taken = step_figures(steps)
    loads = expert_loads(measures)
    return {
        **serving_figures(run, ranks=bench.ranks),
        **steady_figures(run, window, ranks=bench.ranks),
        "steps": steps_taken,
        "experts": {"balancedness": balancedness(loads), "counts": loads, **levels(measured)},
        "ranks": rank_figures(measured),
        "prediction": predicted(bench, steps, steps_taken),
        "timeline": timeline(group_steps(measures, begin_s=run.begin_s, end_s=run.end_s)),
    }


def measures_of(stats: EngineStats) -> list[RankMeasures]:
    """By rank; the engine was started to measure them."""
    found = [rank.measures for rank in stats.ranks if rank.measures is not None]
    assert len(found) == len(stats.ranks), "the ranks were started without instruments"
    return found


def levels(measured: Measured) -> dict[str, Any]:
    """Mean over max of the pairs that the ranks' experts computed, step by step, and what moved meanwhile."""
    first, last = measured.before.ranks[0], measured.after.ranks[0]
    most = last.most_pairs - first.most_pairs
    return {
        "rank_level": (last.mean_pairs - first.mean_pairs) / most if most else None,
        "rebalances": last.experts.rebalances - first.experts.rebalances,
        "experts_moved": last.experts.experts_moved - first.experts.experts_moved,
    }


_COUNTED = (
    "steps", "idle_steps", "computed_tokens", "generated_tokens", "finished", "preemptions", "prefix_hits",
    "overflow_steps", "rerun_steps", "cut_steps", "replayed_steps", "network_bytes", "node_bytes", "slow_steps",
)  # fmt: skip


def rank_figures(measured: Measured) -> list[dict[str, Any]]:
    """What each rank counted in the run."""

    def grown(before: RankStats, after: RankStats) -> dict[str, Any]:
        return {name: getattr(after, name) - getattr(before, name) for name in _COUNTED}

    pairs = zip(measured.before.ranks, measured.after.ranks, strict=True)
    words = ("rank", "uncut_steps", "launched_steps")
    return [{**grown(before, after), **{name: getattr(after, name) for name in words}} for before, after in pairs]


def predicted(bench: Bench, steps: Sequence[GroupStep], taken: dict[str, Any]) -> dict[str, Any] | None:
    """The median decode step beside the cost model's, and the shares of the device's peaks; None where there is no such
    step, or no profile of the device."""
    path = hardware_path(bench.config)
    if path is None or taken["step_ms"] is None:
        return None
    decodes = [step for step in steps if step.only_decodes]
    step = MeasuredStep(
        step_ms=taken["step_ms"]["median"],
        step_cpu_ms=taken["step_cpu_ms"] if bench.config.device == "cpu" and torch.get_num_threads() == 1 else None,
        tokens=statistics.fmean([max(step.tokens_R) for step in decodes]),
        mean_tokens=taken["batch_per_gpu"],
        context_len=taken["context_len"],
        ranks=bench.ranks,
        tracks=round(statistics.fmean([step.ranks[0].tracks for step in decodes])),
        sharing=bench.sharing,
    )
    hardware, shape = read_hardware(path), cost_shape(bench)
    width = 1 if shape.fp8 and bench.config.device != "cpu" else run_dtype(bench.config, bench.engine.model).itemsize
    return {
        "hardware": hardware.name,
        **prediction_figures(operations_of(bench), step),
        **use_figures(shape, hardware, step, width=width),
    }


def operations_of(bench: Bench) -> Operations:
    """The cost model of this group."""
    path = hardware_path(bench.config)
    assert path is not None, "asked for where the device is known"
    config, model = bench.engine.config, bench.engine.model
    config, _ = settle_exchange(config, model, local_size=None, on_gpu=config.device != "cpu")
    group = group_of(config, model, tokens=full_step(config))
    return read_device_costs(path).operations(cost_shape(bench), group)


def cost_shape(bench: Bench) -> CostShape:
    """What the cost model counts of this engine's model, its latents as they are kept."""
    return CostShape.of(bench.engine.model, fp8_cache=bench.config.cache.is_fp8)


HEADLINES = {
    "output_throughput_per_gpu": True,
    "tokens_per_s_per_user": True,
    "median_ttft_ms": False,
    "mean_tpot_ms": False,
    "median_step_ms": False,
}
"""The figures that runs are compared by; whether more is better."""


def headline(run: dict[str, Any]) -> dict[str, float | None]:
    """Of the steady part where there is one."""
    steady, step_ms = run["steady"] or {}, run["steps"]["step_ms"]
    return {
        "output_throughput_per_gpu": steady.get("output_throughput_per_gpu", run["output_throughput_per_gpu"]),
        "tokens_per_s_per_user": steady.get("tokens_per_s_per_user"),
        "median_ttft_ms": run["median_ttft_ms"],
        "mean_tpot_ms": run["mean_tpot_ms"],
        "median_step_ms": step_ms and step_ms["median"],
    }


def noise(each: Sequence[dict[str, Any]], middle: dict[str, Any]) -> dict[str, Any]:
    """Standard errors of the headlines: over repeats where there are enough, else from within the run.

    From within, the disturbances that last as long as a run stay unseen, which is why `source` says so.
    """
    if len(each) >= NOISE_REPEATS:
        values = {name: [v for run in each if (v := headline(run)[name]) is not None] for name in HEADLINES}
        errors = {name: _error(found) for name, found in values.items()}
        return {"source": f"{len(each)} runs", "errors": errors}
    steady, count = middle["steady"], max(middle["completed"], 1)
    slices = _error(steady["slices"]) if steady else None
    share = slices / steady["output_throughput"] if steady and slices is not None else None
    step_ms, number = middle["steps"]["step_ms"], middle["steps"]["decode_steps"]
    of = headline(middle)
    user = of["tokens_per_s_per_user"]
    return {
        "source": "within one run",
        "errors": {
            "output_throughput_per_gpu": None if share is None else share * (of["output_throughput_per_gpu"] or 0.0),
            "tokens_per_s_per_user": None if share is None or user is None else share * user,
            "median_ttft_ms": _of_median(middle["std_ttft_ms"], count),
            "mean_tpot_ms": middle["std_tpot_ms"] and middle["std_tpot_ms"] / math.sqrt(count),
            "median_step_ms": step_ms and _of_median((step_ms["p90"] - step_ms["median"]) / 1.2816, number),
        },
    }


def _error(values: Sequence[float]) -> float | None:
    """Standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _of_median(spread: float | None, count: int) -> float | None:
    """Standard error of the median of a normal sample with that standard deviation."""
    return None if spread is None else math.sqrt(math.pi / 2) * spread / math.sqrt(count)


def settings(bench: Bench, load: Workload) -> dict[str, Any]:
    """What was asked for, under the names of the flags: all of the engine's, for any may change a figure."""
    config, flags = bench.engine.config, bench.flags
    offered = {name: (str(value) if isinstance(value, Path) else value) for name, value in asdict(load).items()}
    if math.isinf(load.request_rate):
        offered["request_rate"] = "inf"
    return {
        "model_id": flags.engine.model,
        **engine_settings(config),
        "transport": bench.transport,
        "dtype": str(run_dtype(config, bench.engine.model)).removeprefix("torch."),
        "decode_only": flags.decode_only,
        "temperature": flags.temperature,
        "weights": "random" if config.load_format == "dummy" else "checkpoint",
        "routing_source": routing_source(bench, load),
        **offered,
    }


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """Every setting of an engine by its flag, but for the folder of its model and the profile of its device."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(asdict(config))).items():  # as a file has them: lists, no tuples
        found |= value if isinstance(value, dict) else {name: value}
    return {name: value for name, value in found.items() if name not in ("model", "hardware")}


def routing_source(bench: Bench, load: Workload) -> str:
    """Where the experts of a token come from: never simulated, but a router of random weights is nearly level."""
    router = "random weights" if bench.config.load_format == "dummy" else "the checkpoint"
    if bench.flags.decode_only:
        return f"router of {router}, on random latents"
    return f"router of {router}, on prompts drawn {'evenly' if not load.skew else f'with skew {load.skew:g}'}"
