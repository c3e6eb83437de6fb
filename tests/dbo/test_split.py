"""Rows are cut into tracks whole, level, in order, and never beyond what other ranks expect."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo import most_tokens, split

rows_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 9000)).map(lambda row: (row[0], row[0] + row[1])), max_size=40
)


def tokens_of(rows, track) -> int:
    return sum(rows[place][0] for place in track)


def work_of(rows, track) -> int:
    return sum(rows[place][0] * rows[place][1] for place in track)


def test_the_example_of_the_module():
    assert split([(1, 900), (1, 100), (1, 800), (1, 90)], 2) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("num_tracks", [1, 2, 3, 7])
def test_no_rows_give_empty_tracks(num_tracks: int):
    assert split([], num_tracks) == [[]] * num_tracks


def test_one_row_leaves_the_other_tracks_empty():
    assert split([(1, 50)], 3) == [[0], [], []]


@given(rows=rows_strategy, num_tracks=st.integers(1, 5))
def test_every_row_is_in_one_track_and_the_order_is_kept(rows: list, num_tracks: int):
    tracks = split(rows, num_tracks)
    assert len(tracks) == num_tracks
    assert sorted(place for track in tracks for place in track) == list(range(len(rows)))
    assert all(track == sorted(track) for track in tracks)


@settings(max_examples=300)
@given(ranks=st.lists(rows_strategy, min_size=1, max_size=6), num_tracks=st.integers(1, 5))
def test_no_track_of_any_rank_has_more_tokens_than_all_expect(ranks: list, num_tracks: int):
    bucket = max(sum(tokens for tokens, _ in rows) for rows in ranks)
    longest = max([tokens for rows in ranks for tokens, _ in rows], default=0)
    expected = most_tokens(bucket, num_tracks=num_tracks, longest_row=longest)
    assert expected <= bucket
    for rows in ranks:
        assert max(tokens_of(rows, track) for track in split(rows, num_tracks)) <= expected


@pytest.mark.parametrize(("tokens", "num_tracks", "most"), [(0, 2, 0), (1, 2, 1), (7, 2, 4), (256, 2, 128), (7, 3, 3)])
def test_single_tokens_are_halved(tokens: int, num_tracks: int, most: int):
    assert most_tokens(tokens, num_tracks=num_tracks, longest_row=1) == most
    tracks = split([(1, 100 + place) for place in range(tokens)], num_tracks)
    assert max(len(track) for track in tracks) == most


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_tracks", [2, 3])
def test_decodes_of_all_lengths_are_level_in_tokens_and_in_attention(seed: int, num_tracks: int):
    draw = random.Random(seed)
    rows = [(1, int(draw.lognormvariate(7.5, 1.0)) + 1) for _ in range(150)]
    rows.sort(key=lambda row: row[1])  # the worst for a cut in the middle
    tracks = split(rows, num_tracks)
    assert max(len(track) for track in tracks) <= -(-150 // num_tracks)
    mean = work_of(rows, range(150)) / num_tracks
    heaviest = max(context for _, context in rows)
    assert max(work_of(rows, track) for track in tracks) <= max(1.02 * mean, heaviest)


@pytest.mark.parametrize("seed", range(20))
def test_prompt_chunks_among_decodes_are_level_too(seed: int):
    draw = random.Random(seed)
    rows = [(1, draw.randint(1, 4000)) for _ in range(60)]
    rows += [(tokens, tokens + draw.randint(0, 2000)) for tokens in (draw.randint(50, 250) for _ in range(9))]
    tracks = split(rows, 2)
    assert max(tokens_of(rows, track) for track in tracks) <= 0.6 * tokens_of(rows, range(len(rows)))
    assert max(work_of(rows, track) for track in tracks) <= 0.6 * work_of(rows, range(len(rows)))


def test_one_long_context_does_not_push_all_others_into_one_track():
    rows = [(1, 10**6), *[(1, 5)] * 9]
    tracks = split(rows, 2)
    assert [len(track) for track in tracks] == [5, 5]
