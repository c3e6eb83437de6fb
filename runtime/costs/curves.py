"""Measured points and what lies between them: straight lines, and beyond the last point its slope.

Below the first point its value holds: where tables begin, times are a floor (weights to read, kernels to launch).
Plain numbers; knows no unit and no machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curve:
    """y over x, x ascending. `Curve((64, 128), (75, 90)).at(96)` is 82.5, `.at(1)` 75, `.at(192)` 105."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_ascending(self.xs)
        if len(self.ys) != len(self.xs):
            raise ValueError(f"a curve has {len(self.xs)} places and {len(self.ys)} values; it must have one for each")

    def at(self, x: float) -> float:
        """The value at x."""
        return _between(self.xs, x, self.ys)


@dataclass(frozen=True, slots=True)
class Grid:
    """z over x and y, both ascending; `rows[i][j]` is the value at `xs[i]`, `ys[j]`."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_ascending(self.xs)
        _check_ascending(self.ys)
        if len(self.rows) != len(self.xs) or any(len(row) != len(self.ys) for row in self.rows):
            raise ValueError(
                f"a grid of {len(self.xs)} x {len(self.ys)} places has rows of {[len(row) for row in self.rows]} values"
            )

    def at(self, x: float, y: float) -> float:
        """The value at x, y."""
        return _between(self.xs, x, [_between(self.ys, y, row) for row in self.rows])


def _check_ascending(places: Sequence[float]) -> None:
    if not places or any(left >= right for left, right in pairwise(places)):
        raise ValueError(f"places of a table are {list(places)}; they must be ascending, e.g. [64, 128]")


def _between(places: Sequence[float], place: float, values: Sequence[float]) -> float:
    if place <= places[0] or len(places) == 1:
        return values[0]
    right = min(bisect_right(places, place), len(places) - 1)
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
