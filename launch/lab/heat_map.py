"""Loads of experts as a picture: layers down, experts across, a glyph darker for each doubling of the mean.

    layer 0   ..+.  @ . +          ' ' below half the mean, '.' to the mean, ':' to twice, then - = + * # % @
    layer 1   . . +..:.+.

Where experts outnumber columns, a column shows the hottest of its experts. Glyphs alone say everything; colours only
help. The terminal's picture needs nothing; a PNG needs matplotlib, which is imported when one is asked for.

Legend: Y layers, E experts.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

GLYPHS = " .:-=+*#%@"
_STYLES = ("dim", "dim", "green", "green", "yellow", "yellow", "red", "red", "bold red", "bold red")
LEGEND = (
    f"load over the layer's mean, a column its hottest expert: {GLYPHS[:2]!r} to 0.5 and 1, then a glyph a doubling"
)
_INCHES_PER_EXPERT, _INCHES_PER_LAYER = 0.04, 0.16


def relative(loads_YE: np.ndarray) -> np.ndarray:
    """[Y, E] loads over the mean of their layer; 0 in a layer without load."""
    mean_Y1 = loads_YE.mean(axis=1, keepdims=True)
    return np.where(mean_Y1 > 0, loads_YE / np.where(mean_Y1 > 0, mean_Y1, 1.0), 0.0)


def heat_lines(loads_YE: np.ndarray, *, columns: int) -> list[Text]:
    """A line for each layer, at most `columns` glyphs of experts."""
    heat_YE = relative(loads_YE)
    per_column = -(-heat_YE.shape[1] // max(columns, 1))
    starts = range(0, heat_YE.shape[1], per_column)
    lines = []
    for layer, heat_E in enumerate(heat_YE):
        line = Text(f"{layer:>5} ")
        for start in starts:
            level = _level(float(heat_E[start : start + per_column].max()))
            line.append(GLYPHS[level], style=_STYLES[level])
        lines.append(line)
    return lines


def _level(heat: float) -> int:
    """0 below half the mean, 1 to the mean, 2 to twice the mean, and so on."""
    if heat <= 0.5:
        return 0
    return min(int(np.ceil(np.log2(heat))) + 1, len(GLYPHS) - 1)


def save_png(loads_YE: np.ndarray, path: Path, *, title: str) -> None:
    """Write the picture with every expert. Raises ValueError when matplotlib is missing, OSError for the file."""
    figures, agg = _matplotlib()
    num_layers, num_experts = loads_YE.shape
    size = (max(6.0, 2 + num_experts * _INCHES_PER_EXPERT), max(2.5, 1.5 + num_layers * _INCHES_PER_LAYER))
    figure = figures.Figure(figsize=size, layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        np.log2(np.maximum(relative(loads_YE), 2.0**-4)), aspect="auto", cmap="inferno", interpolation="nearest"
    )
    axes.set(title=title, xlabel="expert", ylabel="MoE layer")
    figure.colorbar(image, ax=axes, label="log2 of load over the layer's mean")
    figure.savefig(path, format="png", dpi=120)


def _matplotlib() -> tuple[Any, Any]:
    try:
        return import_module("matplotlib.figure"), import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise ValueError(
            f"png needs matplotlib, which is not installed ({error}); install it with: pip install 'serried[report]', "
            "or leave --png out"
        ) from error
