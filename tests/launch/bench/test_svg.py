"""Charts are well-formed, whole, and show every value that they were given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from launch.bench.svg import HEAT, Axis, front, heat_map, line_chart, scatter_chart, stacked_columns

SVG = ".//svg"


def parsed(chart: str) -> ET.Element:
    return ET.fromstring(chart)


def test_a_line_goes_through_its_points_and_bad_words_stay_words():
    chart = parsed(line_chart("a < b & c", {"x <1>": [(0, 0), (5, 10)]}, x_label="s", y_label="ms", marks=True))
    assert chart.find("figcaption").text == "a < b & c"  # type: ignore[union-attr]
    [line] = chart.iterfind(".//polyline")
    (x0, y0), (x1, y1) = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert x1 > x0
    assert y1 < y0, "up is more"
    assert len(list(chart.iterfind(".//circle"))) == 2
    assert "x <1>" in [text.text for text in chart.iterfind(".//text")]


def test_columns_are_as_high_as_their_parts_together():
    chart = parsed(stacked_columns("t", ["a", "b"], {"one": [1, 3], "two": [2, 0]}, x_label="", y_label="ms"))
    boxes = [box for box in chart.iterfind(".//rect") if box.find("title") is not None]
    heights = {box.find("title").text: float(box.attrib["height"]) for box in boxes}  # type: ignore[union-attr]
    assert set(heights) == {"one: a 1", "one: b 3", "two: a 2"}, "nothing is drawn for nothing"
    assert heights["one: b 3"] == pytest.approx(3 * heights["one: a 1"], abs=0.2)
    assert {"one", "two"} <= {text.text for text in chart.iterfind(".//text")}


def test_a_heat_map_has_a_cell_a_value_and_the_hottest_is_the_darkest():
    chart = parsed(heat_map("t", [[0.0, 1.0, 2.0], [2.0, 0.5, 9.0]], x_label="e", y_label="l", most=2.0))
    cells = {path.attrib["fill"]: path.attrib["d"].count("M") for path in chart.iterfind(".//path")}
    assert sum(cells.values()) == 6
    assert cells[HEAT[-1]] == 3, "and what is hotter than that"
    assert cells[HEAT[0]] == 1


def test_without_any_load_a_heat_map_is_pale():
    chart = parsed(heat_map("t", [[0.0, 0.0]], x_label="e", y_label="l", most=0.0))
    assert {path.attrib["fill"] for path in chart.iterfind(".//path")} == {HEAT[0]}


def test_the_front_has_the_points_that_no_other_beats_in_both():
    points = {"a": (1.0, 9.0), "b": (2.0, 5.0), "c": (1.5, 4.0), "d": (3.0, 1.0), "e": (3.0, 0.5)}
    assert front(points) == ["a", "b", "d"]
    assert front({}) == []
    chart = parsed(scatter_chart("t", points, x_label="x", y_label="y"))
    assert len(list(chart.iterfind(".//circle"))) == 5
    [line] = chart.iterfind(".//polyline")
    assert len(line.attrib["points"].split()) == 3


@pytest.mark.parametrize("high", [0.003, 1.0, 7.0, 99.0, 123456.0])
def test_ticks_are_few_round_and_inside(high: float):
    ticks = Axis(0.0, high, 0, 100).ticks()
    assert 2 <= len(ticks) <= 7
    assert all(0 <= tick <= high * 1.000001 for tick in ticks)
    assert all(re.match(r"^(0|[125]0*)$", f"{(ticks[1] - ticks[0]):e}"[0]) for _ in ticks)


def test_values_that_are_all_zero_can_be_drawn():
    parsed(line_chart("t", {"a": [(0, 0)]}, x_label="", y_label=""))
    parsed(scatter_chart("t", {"a": (0.0, 0.0)}, x_label="", y_label=""))
    parsed(stacked_columns("t", ["a"], {}, x_label="", y_label=""))
