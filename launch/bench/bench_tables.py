"""The figures of a benchmark for a terminal: what was asked, where, with which settings, tables, a line of JSON.

Knows figures (see `bench_result`) and how to lay them out; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..command.wide_table import print_table

QUESTION = "How many tokens a second does each rank give, at what latency, and where does the time of a step go?"
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
BULKY = ("timeline", "ranks", "repeats", "percentiles")
EXCHANGE = ("dispatch", "combine")


def tell(found: Mapping[str, Any], out: Console) -> None:
    """Print everything of one result but its line of JSON."""
    for line in heading(found):
        out.print(line, markup=False)
    print_table(out, speed_table(found))
    print_table(out, latency_table(found))
    if found["steps"]["step_ms"] is not None:
        print_table(out, parts_table(found))
    for line in closing(found):
        out.print(line, markup=False)


def heading(found: Mapping[str, Any]) -> list[str]:
    """Question, machine, commit, settings."""
    settings, environment = found["settings"], found["environment"]
    return [
        QUESTION,
        f"machine   {environment['machine']}",
        f"commit    {environment['commit']}",
        f"settings  {settings['model_id']} ({settings['weights']} weights), {settings['dtype']}, {settings['ranks']} "
        f"ranks over {settings['transport']}, {offered_words(settings)}; seed {settings['seed']}, "
        f"{environment['threads_per_rank']} threads a rank",
        f"routing   {settings['routing_source']}",
    ]


def offered_words(settings: Mapping[str, Any]) -> str:
    """The load in words."""
    if settings["trace_file"] is not None:
        lengths = f"{settings['num_prompts']} requests of {settings['trace_file']}"
    else:
        drawn = f" +- {settings['range_ratio']:.0%}" if settings["range_ratio"] else ""
        prompts = "contexts filled to" if settings["decode_only"] else "prompts of"
        lengths = (
            f"{settings['num_prompts']} requests, {prompts} {settings['input_len']}{drawn} tokens, outputs of "
            f"{settings['output_len']}{drawn}"
        )
    limit = settings["max_concurrency"]
    together = "all at once" if limit is None else f"at most {limit} at once"
    if settings["request_rate"] != "inf":
        together += f", {settings['request_rate']:g} arrive a second (burstiness {settings['burstiness']:g})"
    return f"{lengths}, {together}, temperature {settings['temperature']:g}"


def speed_table(found: Mapping[str, Any]) -> Table:
    """Throughput of the whole run, and of its steady part."""
    steady = found["steady"]
    table = table_of("throughput", "whole run", "steady part")
    span = f"{steady['seconds']:.2f}, from {steady['begin_s']:.2f}" if steady else "none"
    table.add_row("seconds", f"{found['duration']:.2f}", span)
    table.add_row("requests, ended / failed", f"{found['completed']} / {found['failed']}", "")
    table.add_row("requests/s", f"{found['request_throughput']:.2f}", "")
    table.add_row("output tokens/s", f"{found['output_throughput']:.1f}", _of(steady, "output_throughput", ".1f"))
    table.add_row(
        "output tokens/s per GPU",
        f"{found['output_throughput_per_gpu']:.1f}",
        _of(steady, "output_throughput_per_gpu", ".1f"),
    )
    ranks = [_of(steady, f"rank_throughput_{name}", ".1f") for name in ("min", "median", "max")]
    table.add_row("  ranks: min / median / max", "", " / ".join(ranks) if steady else "")
    table.add_row("output tokens/s per user", "", _of(steady, "tokens_per_s_per_user", ".2f"))
    table.add_row("total tokens/s", f"{found['total_token_throughput']:.1f}", "")
    return table


def latency_table(found: Mapping[str, Any]) -> Table:
    """Milliseconds, of all requests that ended."""
    table = table_of("latency, ms", "mean", "median", "std", "P90", "P99")
    for name, title in LATENCIES.items():
        values = [found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", "p90", "p99")]
        table.add_row(title, *["-" if value is None else f"{value:.2f}" for value in values])
    return table


def parts_table(found: Mapping[str, Any]) -> Table:
    """Where an average rank's time of a decode step goes, beside what the cost model says."""
    steps, predicted = found["steps"], predicted_parts(found["prediction"])
    table = table_of("decode step, ms", "wall", "share", "CPU", "predicted")
    whole = sum(steps["parts_ms"].values())
    for name, value in steps["parts_ms"].items():
        expected = predicted.get(name)
        table.add_row(
            "waiting at the beat" if name == "beat" else name,
            f"{value:.3f}",
            f"{value / whole:.1%}",
            f"{steps['parts_cpu_ms'][name]:.3f}",
            "" if expected is None else f"{expected:.3f}",
        )
    table.add_section()
    step, prediction = steps["step_ms"], found["prediction"]
    predicted_ms = "" if prediction is None else f"{prediction['predicted_step_ms']:.3f}"
    table.add_row("step, median", f"{step['median']:.3f}", "", "", predicted_ms)
    table.add_row("step, P90", f"{step['p90']:.3f}", "", "", "")
    return table


def predicted_parts(prediction: Mapping[str, Any] | None) -> dict[str, float]:
    """By the names of measured parts; both ways of the exchange stand at `dispatch`."""
    if prediction is None:
        return {}
    parts = dict(prediction["predicted_parts_ms"])
    return {"dispatch": parts.pop("exchange"), **parts}


def closing(found: Mapping[str, Any]) -> list[str]:
    """What has no table."""
    steps, experts, ranks = found["steps"], found["experts"], found["ranks"]
    lines = []
    if steps["step_ms"] is not None:
        lines.append(
            f"batch     {steps['batch_per_gpu']:.2f} requests a rank and step (ranks: {steps['batch_min']:.2f} to "
            f"{steps['batch_max']:.2f}), contexts of {steps['context_len']:.0f} tokens, {steps['decode_steps']} of "
            f"{steps['steps']} steps in the steady part only decode"
        )
        lines.append(
            f"balance   ranks {_share(steps['balance_ratio'])} (mean over max of their tokens), their experts "
            f"{_share(experts['rank_level'])}, experts {_share(experts['balancedness'])} (mean over max in a layer)"
        )
        lines.append(
            f"step      {steps['overhead_cpu_share']:.1%} of the CPU time is not the model's; exposed communication "
            f"{steps['exposed_communication']:.1%}, waiting at the beat {steps['wait_at_beat']:.1%}; in several tracks "
            f"{steps['dbo_hit_rate']:.0%}; run again for overflow: {ranks[0]['rerun_steps']}" + _replays(ranks[0])
        )
    lines += prediction_lines(found["prediction"])
    lines.append(f"tokens    hash {found['token_hash']} over {found['total_output_tokens']} tokens")
    noise, speed = found["noise"], (found["noise"]["errors"]["output_throughput_per_gpu"])
    if speed is not None:
        lines.append(f"noise     standard error of output tokens/s per GPU {speed:.2f}, {noise['source']}")
    return lines


def _replays(rank: Mapping[str, Any]) -> str:
    """How many steps were graphs, where some can be."""
    if not rank["replayed_steps"] and not rank["launched_steps"]:
        return ""
    others = f", kernel by kernel {rank['launched_steps']}" if rank["launched_steps"] else ""
    return f"; replayed as graphs: {rank['replayed_steps']}{others}"


def prediction_lines(prediction: Mapping[str, Any] | None) -> list[str]:
    """The cost model's word, its error, and the use of the device."""
    if prediction is None:
        return [
            "predicted nothing: give --hardware FILE, a device's profile, for a CPU by `serried bench kernels --save`"
        ]
    shared = "" if prediction["sharing"] == 1.0 else f", each core with the work of {prediction['sharing']:g} ranks"
    by_cpu = prediction["signed_error_cpu"]
    cpu = "" if by_cpu is None else f"; by CPU time {prediction['measured_cpu_ms']:.2f}, error {by_cpu:+.1%}"
    return [
        f"predicted {prediction['predicted_step_ms']:.2f} ms a step, measured {prediction['measured_step_ms']:.2f}: "
        f"error {prediction['signed_error']:+.1%}{cpu} ({prediction['hardware']}{shared})",
        f"use       MBU {prediction['mbu']:.1%} of {prediction['activated_bytes_per_step'] / 2**20:.1f} MiB activated, "
        f"MFU {prediction['mfu']:.1%} of {prediction['flops_per_step'] / 1e9:.2f} GFLOP a rank and step",
    ]


def last_line(found: Mapping[str, Any]) -> str:
    """One line of JSON without what is long; a file of --output-json has everything."""
    short = {name: value for name, value in found.items() if name not in BULKY}
    if "experts" in short:
        short["experts"] = {name: value for name, value in short["experts"].items() if name != "counts"}
    return json.dumps(short)


def table_of(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
    return table


def _of(part: Mapping[str, Any] | None, name: str, form: str) -> str:
    value = part and part[name]
    return "" if value is None else f"{value:{form}}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
