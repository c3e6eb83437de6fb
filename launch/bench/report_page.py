"""The report of a benchmark: one page with plots, a timeline of steps, a heat map of experts and all settings.

Whole in itself: styles and pictures are inside, nothing is fetched, no script runs; it forbids a browser both.
Knows figures (see `bench_result`); measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from runtime.bench.serving_metrics import PERCENTILES
from runtime.forward.part_times import Part

from .bench_tables import LATENCIES, closing, heading
from .svg import heat_map, line_chart, scatter_chart, stacked_columns

Figures = Mapping[str, Any]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """\
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #2e3436; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #2e3436; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: .6rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { background: #f6f6f4; padding: .6rem 1rem; border-radius: .4rem; }
.card b { display: block; font-size: 1.3rem; }"""

MOST_RANKS = 8
"""Ranks whose timelines are drawn."""


def write_page(path: Path, results: Sequence[Figures]) -> None:
    """Write the page of one run, or of the points of a sweep. OSError where it cannot be."""
    path.write_text(page(results), encoding="utf-8")


def page(results: Sequence[Figures]) -> str:
    """The whole page. `results`: one, or the points of a sweep; the last one's details are shown."""
    found = results[-1]
    title = f"serried: {found['settings']['model_id']} on {found['settings']['ranks']} ranks"
    parts = [f"<h1>{escape(title)}</h1>", _lines(heading(found)), cards(found)]
    parts.append(_section("Throughput against speed for a user", pareto(results)))
    parts.append(_section("Latency", latencies(found)))
    parts.append(_section("Where the time of a step goes", breakdown(found) + steps_picture(found)))
    parts.append(_section("Experts", experts_picture(found)))
    parts.append(_section("In words", _lines(closing(found))))
    parts.append(_section("Settings", _table(found["settings"])))
    parts.append(_section("Environment", _table(found["environment"])))
    figures = json.dumps({name: value for name, value in found.items() if name != "timeline"}, indent=1)
    parts.append(f"<details><summary>All figures</summary><pre>{escape(figures)}</pre></details>")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{escape(POLICY, quote=True)}">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def cards(found: Figures) -> str:
    """The figures that people ask for first."""
    steady, steps = found["steady"] or {}, found["steps"]
    shown = {
        "output tokens/s per GPU": steady.get("output_throughput_per_gpu", found["output_throughput_per_gpu"]),
        "tokens/s per user": steady.get("tokens_per_s_per_user"),
        "median TTFT, ms": found["median_ttft_ms"],
        "mean TPOT, ms": found["mean_tpot_ms"],
        "decode step, ms": steps["step_ms"] and steps["step_ms"]["median"],
    }
    boxes = [
        f'<div class="card"><b>{"-" if value is None else f"{value:.4g}"}</b>{escape(name)}</div>'
        for name, value in shown.items()
    ]
    return f'<div class="cards">{"".join(boxes)}</div>'


def pareto(results: Sequence[Figures]) -> str:
    """A point a result: what a rank gives against what a user sees."""
    points = {}
    for found in results:
        steady = found["steady"]
        if steady and steady["tokens_per_s_per_user"]:
            name = f"{found['settings']['max_concurrency'] or found['settings']['num_prompts']} at once"
            points[name] = (steady["tokens_per_s_per_user"], steady["output_throughput_per_gpu"])
    if not points:
        return "<p>No run had a steady part.</p>"
    return scatter_chart(
        "Output tokens/s per GPU against tokens/s per user",
        points,
        x_label="tokens/s per user",
        y_label="output tokens/s per GPU",
    )


def latencies(found: Figures) -> str:
    """The distribution of each latency; one picture for those of a token, one for those of a request."""
    percentiles = found["percentiles"]
    pictures = []
    for title, names in (("Latency of a token", ("itl", "tpot")), ("Latency of a request", ("ttft", "e2el"))):
        series = {
            LATENCIES[name]: list(zip(PERCENTILES, percentiles[name], strict=True))
            for name in names
            if percentiles[name]
        }
        if series:
            pictures.append(line_chart(title, series, x_label="percentile of requests or tokens", y_label="ms"))
    return "".join(pictures) or "<p>No request ended.</p>"


def breakdown(found: Figures) -> str:
    """The average decode step, on the wall and by processor time, beside the model's."""
    steps = found["steps"]
    if steps["step_ms"] is None:
        return "<p>No step of the steady part only decoded.</p>"
    names = [part.name.lower() for part in Part]
    columns = {kind: [steps[key][name] for name in names] for kind, key in _KINDS.items()}
    if found["prediction"] is not None:
        parts = dict(found["prediction"]["predicted_parts_ms"])
        parts["dispatch"] = parts.pop("exchange")
        columns["predicted"] = [parts.get(name, 0.0) for name in names]
    return stacked_columns("Average decode step of a rank, by part", names, columns, x_label="", y_label="ms")


_KINDS = {"wall": "parts_ms", "CPU": "parts_cpu_ms"}


def steps_picture(found: Figures) -> str:
    """The last steps of the run, rank by rank, each as a column of its parts."""
    steps = found["timeline"]
    if not steps:
        return ""
    names = [part.name.lower() for part in Part]
    pictures = []
    for rank in range(min(len(steps[0]["parts_ms"]), MOST_RANKS)):
        columns = {f"step {step['step']}, {step['tokens'][rank]} tokens": step["parts_ms"][rank] for step in steps}
        label = f"steps {steps[0]['step']} to {steps[-1]['step']}"
        pictures.append(stacked_columns(f"Timeline of steps, rank {rank}", names, columns, x_label=label, y_label="ms"))
    return "".join(pictures)


def experts_picture(found: Figures) -> str:
    """How often each expert was asked for, over the mean of its layer."""
    counts = found["experts"]["counts"]
    if not counts:
        return "<p>The model has no experts.</p>"
    means = [sum(layer) / len(layer) or 1.0 for layer in counts]
    rows = [[count / mean for count in layer] for layer, mean in zip(counts, means, strict=True)]
    return heat_map(
        "Load of experts over the mean of their layer (1 = level)",
        rows,
        x_label=f"experts 0 to {len(counts[0]) - 1}",
        y_label="layers",
        most=max(max(row) for row in rows),
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _lines(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in values.items()]
    return f"<table>{''.join(rows)}</table>"
