"""Tables of measured times and what is read between their points; the rows that an exchange sends."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from runtime.costs.cost_tables import read_cost_tables
from runtime.costs.curves import Curve, Grid
from runtime.costs.traffic import Traffic

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
H200_FILE = PROFILES / "hardware" / "h200.toml"


def test_rows_of_a_token_are_what_counting_all_choices_gives():
    """6 experts on 3 ranks, 2 a token: each of the 15 pairs is as likely as any other."""
    pairs = list(itertools.combinations(range(6), 2))
    hit = sum(any(expert // 2 == 0 for expert in pair) for pair in pairs) / len(pairs)
    traffic = Traffic(ranks=3, node_size=2, experts=6, top_k=2)
    assert traffic.dispatch_rows == traffic.combine_rows == pytest.approx(hit)
    assert (traffic.near, traffic.far, traffic.rows_by_expert) == (1, 1, 2 / 3)
    slots = Traffic(ranks=3, node_size=2, experts=6, top_k=2, rows_per="slots")
    assert (slots.dispatch_rows, slots.combine_rows) == (traffic.dispatch_rows, 2 / 3)
    wide = Traffic(ranks=256, node_size=8, experts=256, top_k=8)
    assert wide.dispatch_rows == pytest.approx(wide.rows_by_expert)


def test_curves_and_grids_are_straight_between_points_flat_below_and_sloped_beyond():
    curve = Curve((64, 128), (75, 90))
    assert [curve.at(x) for x in (0, 64, 96, 128, 192)] == [75, 75, 82.5, 90, 105]
    assert Curve((5,), (3,)).at(99) == 3
    grid = Grid((0, 10), (0, 4), ((0, 4), (10, 34)))
    assert [grid.at(0, 4), grid.at(10, 0), grid.at(5, 2), grid.at(20, 4), grid.at(-1, -1)] == [4, 10, 12, 64, 0]


@pytest.mark.parametrize(
    ("xs", "message"), [((2, 1), r"places of a table are \[2, 1\]; they must be ascending"), ((1, 2), "2 places and 3")]
)
def test_a_table_that_is_not_one_is_refused(xs: tuple[float, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Curve(xs, (1, 2, 3) if xs == (1, 2) else (1, 2))
    with pytest.raises(ValueError, match="2 x 2 places has rows of"):
        Grid((1, 2), (1, 2), ((1, 2), (1,)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("top_k = 8", "topk = 8", "topk is unknown; the parts are model, moe_layers"),
        ("glue_us = 20.0", "", "glue_us is missing; the parts are"),
        ("glue_us = 20.0", "glue_us = -1", "glue_us is -1; it must be a number of at least 0"),
        ("position = [512, 1024, 2048]", "position = [512, 512, 2048]", "must be ascending"),
        ("ranks = 16", "ranks = 64", "exchange has tables for"),
        ("\n[costs]\n", "\n[costs\n", "is not valid TOML"),
    ],
)
def test_a_broken_file_of_tables_is_refused_in_words(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "device.toml"
    text = H200_FILE.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_cost_tables(path)


def test_a_device_that_was_not_measured_is_refused_in_words():
    with pytest.raises(ValueError, match=r"has no \[costs\]: nothing was measured on this device; use its peaks"):
        read_cost_tables(PROFILES / "hardware" / "cpu.toml")


def test_tables_of_one_model_are_refused_to_another():
    tables = read_cost_tables(H200_FILE)
    tables.check_model(experts=256, top_k=8, moe_layers=58, dense_layers=3)
    message = "experts is 384; these tables were measured with DeepSeek-V3, which has 256; for other models use"
    with pytest.raises(ValueError, match=message):
        tables.check_model(experts=384, top_k=8, moe_layers=60, dense_layers=1)
