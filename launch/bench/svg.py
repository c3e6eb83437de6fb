"""Charts as text: scalable vector graphics to stand inside a page, with nothing to fetch and no script.

Every chart says in words what it shows (a title, and a label on each mark), so that it can be read without colours.
Knows numbers and how to draw them; does not know what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#3465a4", "#c17d11", "#4e9a06", "#a40000", "#75507b", "#06989a", "#8f5902", "#555753", "#ce5c00")
HEAT = ("#f2f0f7", "#dadaeb", "#bcbddc", "#9e9ac8", "#807dba", "#6a51a3", "#54278f", "#3f007d")
WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 30, 44
NAMED_COLUMNS = 8
"""As many columns have room for their names below them."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, drawn from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers within it, at most `most` of them."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(title: str, series: Mapping[str, Points], *, x_label: str, y_label: str, marks: bool = False) -> str:
    """Lines, from 0 upwards; with `marks` a dot at each point. Points of a series are in the order of x."""
    points = [point for line in series.values() for point in line]
    x_axis = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    y_axis = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [_frame(x_axis, y_axis, x_label=x_label, y_label=y_label)]
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join([f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [_dot(x_axis.at(x), y_axis.at(y), colour, f"{name}: {x:.4g}, {y:.4g}") for x, y in line if marks]
        parts.append(_legend(number, name))
    return _svg(title, parts)


def scatter_chart(title: str, points: Mapping[str, tuple[float, float]], *, x_label: str, y_label: str) -> str:
    """Named points, each with its name beside it; those that no other beats in both are joined by a line."""
    x_axis = _axis([x for x, _ in points.values()], LEFT, WIDTH - RIGHT)
    y_axis = _axis([y for _, y in points.values()], HEIGHT - BOTTOM, TOP)
    best = front(points)
    path = " ".join([f"{x_axis.at(points[name][0]):.1f},{y_axis.at(points[name][1]):.1f}" for name in best])
    parts = [_frame(x_axis, y_axis, x_label=x_label, y_label=y_label)]
    parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[0]}" stroke-dasharray="4 3"/>')
    for name, (x, y) in points.items():
        colour = COLOURS[0] if name in best else COLOURS[7]
        parts.append(_dot(x_axis.at(x), y_axis.at(y), colour, f"{name}: {x:.4g}, {y:.4g}"))
        parts.append(_text(x_axis.at(x) + 7, y_axis.at(y) + 4, name))
    return _svg(title, parts)


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Of named points those that no other beats in both, by ascending x."""
    found = []
    highest = -math.inf
    for name in sorted(points, key=lambda name: points[name], reverse=True):
        if points[name][1] > highest:
            found.append(name)
            highest = points[name][1]
    return found[::-1]


def stacked_columns(
    title: str, names: Sequence[str], columns: Mapping[str, Sequence[float]], *, x_label: str, y_label: str
) -> str:
    """A column a key, made of one piece for each of `names`, from the bottom up."""
    y_axis = _axis([sum(column) for column in columns.values()], HEIGHT - BOTTOM, TOP)
    width = (WIDTH - RIGHT - LEFT) / max(len(columns), 1)
    parts = [_frame(None, y_axis, x_label=x_label, y_label=y_label)]
    for place, (key, column) in enumerate(columns.items()):
        bottom = 0.0
        for number, value in enumerate(column):
            if value > 0:
                low, high = y_axis.at(bottom), y_axis.at(bottom + value)
                parts.append(
                    f'<rect x="{LEFT + place * width:.1f}" y="{high:.1f}" width="{max(width - 1, 0.5):.1f}" '
                    f'height="{low - high:.1f}" fill="{COLOURS[number % len(COLOURS)]}">'
                    f"<title>{escape(f'{key}: {names[number]} {value:.3g}')}</title></rect>"
                )
            bottom += value
        if len(columns) <= NAMED_COLUMNS:
            parts.append(_text(LEFT + (place + 0.5) * width, HEIGHT - BOTTOM + 15, key, anchor="middle"))
    parts += [_legend(number, name) for number, name in enumerate(names)]
    return _svg(title, parts)


def heat_map(title: str, rows: Sequence[Sequence[float]], *, x_label: str, y_label: str, most: float) -> str:
    """A cell a value, dark at `most` and above. One path a shade, so that many cells stay small."""
    height = min(max(len(rows), 1) * 14, 420)
    wide, high = (WIDTH - RIGHT - LEFT) / max(len(rows[0]), 1), height / max(len(rows), 1)
    paths: list[list[str]] = [[] for _ in HEAT]
    for line, values in enumerate(rows):
        for place, value in enumerate(values):
            shade = min(int(max(value, 0.0) / most * len(HEAT)), len(HEAT) - 1) if most > 0 else 0
            paths[shade].append(
                f"M{LEFT + place * wide:.1f} {TOP + line * high:.1f}h{wide:.2f}v{high:.2f}h-{wide:.2f}z"
            )
    parts = [f'<path d="{"".join(path)}" fill="{HEAT[shade]}"/>' for shade, path in enumerate(paths) if path]
    for shade, colour in enumerate(HEAT):
        y = TOP + 16 * shade
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 32, y + 10, f"from {shade * most / len(HEAT):.2g}"))
    parts.append(_text(LEFT, TOP + height + 18, x_label))
    parts.append(_text(8, TOP + 10, y_label))
    return _svg(title, parts, height=max(TOP + height + 30, TOP + 16 * len(HEAT) + 10))


def _axis(values: Sequence[float], begin: float, end: float) -> Axis:
    high = max([*values, 0.0])
    return Axis(0.0, high * 1.05 if high > 0 else 1.0, begin, end)


def _frame(x_axis: Axis | None, y_axis: Axis, *, x_label: str, y_label: str) -> str:
    """Both axes with ticks and labels."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888a85"/>']
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#eeeeec"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:.4g}", anchor="end"))
    for value in x_axis.ticks() if x_axis else ():
        parts.append(_text(x_axis.at(value) if x_axis else 0, bottom + 15, f"{value:.4g}", anchor="middle"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, x_label, anchor="middle"))
    parts.append(_text(8, TOP - 8, y_label))
    return "".join(parts)


def _legend(number: int, name: str) -> str:
    y = TOP + 18 * number
    colour = COLOURS[number % len(COLOURS)]
    rect = f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="12" height="12" fill="{colour}"/>'
    return rect + _text(WIDTH - RIGHT + 32, y + 10, name)


def _dot(x: float, y: float, colour: str, words: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(words)}</title></circle>'


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(title: str, parts: Sequence[str], *, height: float = HEIGHT) -> str:
    head = f'<svg role="img" viewBox="0 0 {WIDTH} {height:.0f}" aria-label="{escape(title, quote=True)}">'
    return f"<figure><figcaption>{escape(title)}</figcaption>{head}{''.join(parts)}</svg></figure>"
