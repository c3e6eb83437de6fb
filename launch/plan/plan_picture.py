"""What could be run, as a picture: tokens/s a GPU over tokens/s a user, a dot for each deployment that fits.

An HTML page draws it itself, as SVG, and opens without a network; a PNG needs matplotlib. Knows points, not how they
come about.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.planning.deployments import Point, pareto

from .plan_arithmetic import arithmetic, settings_line

if TYPE_CHECKING:
    from .plan_goals import Answer, Wish

WIDTH, HEIGHT, MARGIN = 860, 460, 64
COLOURS = ("#3b6ea5", "#c46a2b", "#4f8f4f", "#8a5aa8", "#a8433f", "#5b5b5b", "#2a9d9d", "#b5892d")
"""Of the sizes of groups, in ascending order."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 900px; color: #222; background: #fff; }
pre { background: #f4f4f2; padding: 1em; overflow-x: auto; font-size: 13px; }
table { border-collapse: collapse; } td, th { padding: 2px 12px; text-align: right; border-bottom: 1px solid #ddd; }
svg text { font: 12px system-ui, sans-serif; fill: #444; }
"""


def write_picture(path: Path, wish: Wish, answer: Answer) -> None:
    """Write it. Raises ValueError where a PNG is asked for and matplotlib is missing."""
    if path.suffix == ".png":
        _write_png(path, wish, answer)
    else:
        path.write_text(page(wish, answer), encoding="utf-8")


def page(wish: Wish, answer: Answer) -> str:
    """A whole HTML page."""
    title = f"{wish.model} on {wish.goals.gpus} x {wish.site.costs.hardware.name}"
    sums = "\n".join(arithmetic(wish.site, wish.goals, answer.chosen, why=wish.efficiency_why))
    refused = "".join([f"<p><b>{html.escape(refusal)}</b></p>" for refusal in answer.refusals])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{html.escape(title)}</h1>\n{refused}\n"
        f"{drawing(answer.found, answer.chosen)}\n<p>Each dot is a deployment that fits, by the size of its groups; "
        "those on the line are beaten by none in both. Expected by the cost model, not measured.</p>\n"
        f"<h2>The sums</h2>\n<pre>{html.escape(sums)}</pre>\n<h2>Beaten by none</h2>\n{_rows(answer.found)}\n"
        "</body></html>\n"
    )


def drawing(found: Sequence[Point], chosen: Point | None) -> str:
    """The scatter as an SVG element."""
    across = _Scale.over([point.tokens_per_user for point in found], MARGIN, WIDTH - 20)
    up = _Scale.over([point.tokens_per_gpu for point in found], HEIGHT - MARGIN, 20)
    sizes = sorted({point.config.ranks for point in found})
    parts = [*_axis(across, vertical=False), *_axis(up, vertical=True)]
    for point in found:
        colour = COLOURS[sizes.index(point.config.ranks) % len(COLOURS)]
        x, y = across.at(point.tokens_per_user), up.at(point.tokens_per_gpu)
        told = html.escape(settings_line(point))
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" opacity="0.55"><title>{told}</title></circle>'
        )
    line = " ".join(
        [f"{across.at(each.tokens_per_user):.1f},{up.at(each.tokens_per_gpu):.1f}" for each in pareto(found)]
    )
    parts.append(f'<polyline points="{line}" fill="none" stroke="#222" stroke-width="1.2"/>')
    if chosen is not None:
        x, y = across.at(chosen.tokens_per_user), up.at(chosen.tokens_per_gpu)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="#000" stroke-width="2"/>')
    for place, ranks in enumerate(sizes):
        y = 30 + 18 * place
        parts.append(f'<circle cx="{WIDTH - 110}" cy="{y - 4}" r="4" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(f'<text x="{WIDTH - 100}" y="{y}">{ranks} ranks</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="throughput over speed">{"".join(parts)}</svg>'


class _Scale:
    """From values to places on the drawing, from 0 to a round number."""

    def __init__(self, most: float, low: float, high: float) -> None:
        self.step = 10 ** math.floor(math.log10(most)) / 2
        self.most = math.ceil(most / self.step) * self.step
        self._low, self._high = low, high

    @classmethod
    def over(cls, values: Sequence[float], low: float, high: float) -> _Scale:
        return cls(max(values), low, high)

    def at(self, value: float) -> float:
        return self._low + (self._high - self._low) * value / self.most

    @property
    def ticks(self) -> list[float]:
        return [self.step * place for place in range(round(self.most / self.step) + 1)]


def _axis(scale: _Scale, *, vertical: bool) -> list[str]:
    bottom, parts = HEIGHT - MARGIN, []
    for tick in scale.ticks:
        at, told = scale.at(tick), f"{tick:,g}"
        if vertical:
            parts.append(f'<line x1="{MARGIN}" y1="{at:.1f}" x2="{WIDTH - 20}" y2="{at:.1f}" stroke="#eee"/>')
            parts.append(f'<text x="{MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{told}</text>')
        else:
            parts.append(f'<line x1="{at:.1f}" y1="20" x2="{at:.1f}" y2="{bottom}" stroke="#eee"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{told}</text>')
    if vertical:
        parts.append(f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})">tokens/s a GPU</text>')
    else:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 16}" text-anchor="middle">tokens/s a user</text>')
    return parts


def _rows(found: Sequence[Point]) -> str:
    heads = ("ranks", "requests", "parts", "copies", "beat", "TPOT ms", "tokens/s a user", "tokens/s a GPU")
    lines = ["<table><tr>" + "".join([f"<th>{head}</th>" for head in heads]) + "</tr>"]
    for point in pareto(found):
        config = point.config
        cells = [config.ranks, point.batch, point.tracks, config.eplb.num_redundant_experts, point.interval]
        told = [
            *map(str, cells),
            f"{point.tpot_ms:.1f}",
            f"{point.tokens_per_user:.1f}",
            f"{point.tokens_per_gpu:,.0f}",
        ]
        lines.append("<tr>" + "".join([f"<td>{cell}</td>" for cell in told]) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _write_png(path: Path, wish: Wish, answer: Answer) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"report is {str(path)!r}; a PNG needs matplotlib: pip install serried[report], or .html"
        ) from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for ranks in sorted({point.config.ranks for point in answer.found}):
        group = [point for point in answer.found if point.config.ranks == ranks]
        users, gpus = [point.tokens_per_user for point in group], [point.tokens_per_gpu for point in group]
        axes.scatter(users, gpus, s=14, alpha=0.5, label=f"{ranks} ranks")
    front = pareto(answer.found)
    axes.plot([point.tokens_per_user for point in front], [point.tokens_per_gpu for point in front], "k-", linewidth=1)
    if answer.chosen is not None:
        axes.plot(
            [answer.chosen.tokens_per_user], [answer.chosen.tokens_per_gpu], "ko", fillstyle="none", markersize=11
        )
    axes.set(xlabel="tokens/s a user", ylabel="tokens/s a GPU", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{wish.model} on {wish.goals.gpus} x {wish.site.costs.hardware.name}: expected, not measured")
    axes.legend()
    figure.savefig(path, dpi=120)
