"""Chances against sums over all outcomes and against dice; measured rows by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ep.fullest import BinomialRows, FixedRows, WholeRows, binomial_tail, chance_of_part, measure


@pytest.mark.parametrize(("trials", "chance"), [(1, 0.5), (7, 0.3), (40, 0.05), (128, 0.9), (300, 0.01)])
def test_the_tail_is_the_sum_of_all_outcomes_beyond(trials, chance):
    for places in range(-1, trials + 1, max(1, trials // 9)):
        outcomes = range(places + 1, trials + 1)
        expected = math.fsum(math.comb(trials, n) * chance**n * (1 - chance) ** (trials - n) for n in outcomes)
        assert binomial_tail(trials, chance, places) == pytest.approx(expected, rel=1e-9, abs=1e-200)


def test_certain_and_impossible_tails():
    assert [binomial_tail(5, 1.0, places) for places in (4, 5)] == [1.0, 0.0]
    assert binomial_tail(5, 0.0, 0) == binomial_tail(0, 0.5, 0) == 0.0


@pytest.mark.parametrize("bucket", [0, 1, 2, 7, 128, 1000])
@pytest.mark.parametrize("per_token", [1, 4])
def test_places_are_the_fewest_that_keep_the_risk(bucket, per_token):
    rows = BinomialRows(per_token=per_token, chance=0.3, num_pairs=32, tail=1e-3)
    places = rows.places(bucket)
    assert rows.risk(bucket, places) <= 1e-3
    assert places == 0 or rows.risk(bucket, places - 1) > 1e-3 / 32


@pytest.mark.parametrize(("num_slots", "parts", "top_k"), [(64, 4, 6), (64, 8, 6), (256, 32, 8), (6, 3, 1), (4, 2, 4)])
def test_the_chance_of_a_part_is_what_dice_say(num_slots, parts, top_k):
    slots = torch.rand(20_000, num_slots, generator=torch.Generator().manual_seed(0)).topk(top_k, dim=1).indices
    share = (slots < num_slots // parts).any(1).double().mean().item()
    assert chance_of_part(num_slots, parts, top_k) == pytest.approx(share, abs=4 * math.sqrt(0.25 / 20_000))


def test_more_slots_a_token_than_there_are_touch_every_part():
    assert chance_of_part(4, 2, 9) == 1.0


def test_measured_rows_by_hand():
    """Four exchanges of 100 tokens among two pairs; their fullest pairs have 52, 56, 60 and 70 rows, the mean is 50."""
    rows = measure([[48, 52], [44, 56], [40, 60], [30, 70]], tokens=100, quantile=0.75)
    assert (rows.fullest, rows.mean) == ((52, 56, 60, 70), 50.0)
    assert rows.places(100) == 60
    assert rows.places(400) == 4 * 50 + 2 * 10
    assert rows.places(25) == 13 + 5  # 12.5 + 10 / 2, rounded up
    assert rows.risk(100, 60) == (1 + 1) / (4 + 2)
    assert rows.risk(100, 51) == (4 + 1) / (4 + 2)
    assert rows.risk(100, 70) == (0 + 1) / (4 + 2)
    assert rows.risk(400, 220) == rows.risk(100, 60)


def test_nothing_measured_is_refused_in_words():
    with pytest.raises(ValueError, match="counts is empty: capacities need at least one recorded exchange"):
        measure([], tokens=1)


def test_the_whole_bucket_has_no_risk_and_of_a_fixed_number_nothing_is_known():
    assert WholeRows(per_token=3).places(7) == 21
    assert WholeRows().risk(7, 7) == 0.0
    assert FixedRows(number=3).places(100) == 3
    assert math.isnan(FixedRows(number=3).risk(100, 3))
    assert FixedRows(number=3).risk(3, 3) == 0.0
