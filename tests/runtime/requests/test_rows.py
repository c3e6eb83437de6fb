"""How far samples reach: accepted drafts, the ends of a request, failed positions."""

import pytest

from runtime.requests.request import FinishReason, Request, ending_ids
from runtime.requests.rows import FAILED_TOKEN, Row, Rows, SampledRow, Samples, Verdict, judge
from runtime.requests.sampling_params import SamplingParams


def make_row(*, drafts: tuple[int, ...] = (), stops: tuple[int, ...] = (), min_tokens: int = 0, room: int = 9) -> Row:
    """A request of 3 prompt tokens that may still say `room` tokens, and its next row."""
    request = Request(
        id="r",
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=99, min_tokens=min_tokens),
        arrival=0,
        stop_ids=frozenset(stops),
    )
    request.drafts = list(drafts)
    request.max_len = 3 + room
    return Row(request, 2, 1 + len(drafts), len(drafts), True)


@pytest.mark.parametrize(
    ("sampled", "new_tokens", "num_accepted"),
    [((7, 8, 9), (7,), 0), ((5, 7, 9), (5, 7), 1), ((5, 6, 9), (5, 6, 9), 2)],
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    sampled: tuple[int, ...], new_tokens: tuple[int, ...], num_accepted: int
) -> None:
    assert judge(make_row(drafts=(5, 6)), sampled) == Verdict(new_tokens, num_accepted, None)


def test_row_without_drafts_takes_its_one_token() -> None:
    row = make_row()
    row.request.drafts = [7, 7]  # left from an earlier row
    assert judge(row, (7,)) == Verdict((7,), 0, None)


def test_stop_token_is_the_last_and_drafts_after_it_are_dropped() -> None:
    assert judge(make_row(drafts=(5, 6), stops=(5,)), (5, 6, 9)) == Verdict((5,), 0, FinishReason.STOP)


def test_stop_token_counts_only_from_min_tokens_on() -> None:
    row = make_row(drafts=(5, 5), stops=(5,), min_tokens=2)
    assert judge(row, (5, 5, 9)) == Verdict((5, 5), 1, FinishReason.STOP)


def test_length_ends_it_where_room_ends() -> None:
    assert judge(make_row(drafts=(5, 6), room=2), (5, 6, 9)) == Verdict((5, 6), 1, FinishReason.LENGTH)


def test_stop_at_the_last_place_is_called_a_stop() -> None:
    assert judge(make_row(stops=(5,), room=1), (5,)) == Verdict((5,), 0, FinishReason.STOP)


def test_failed_position_ends_it_with_what_came_before() -> None:
    assert judge(make_row(), (FAILED_TOKEN,)) == Verdict((), 0, FinishReason.ERROR)
    assert judge(make_row(drafts=(5, 6)), (5, FAILED_TOKEN, 9)) == Verdict((5,), 1, FinishReason.ERROR)


def test_failed_position_after_a_wrong_draft_is_no_failure() -> None:
    assert judge(make_row(drafts=(5, 6)), (7, FAILED_TOKEN, FAILED_TOKEN)) == Verdict((7,), 0, None)


def test_row_is_prefill_unless_it_computes_the_newest_token_only() -> None:
    request = make_row().request
    assert not Row(request, 4, 1, 0, True).is_prefill
    assert not Row(request, 4, 3, 2, True).is_prefill
    assert Row(request, 4, 1, 0, False).is_prefill
    assert Row(request, 4, 2, 0, True).is_prefill


def test_eos_ends_a_request_unless_it_is_ignored() -> None:
    assert ending_ids(SamplingParams(stop_token_ids=(7,)), (1, 2)) == {1, 2, 7}
    assert ending_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (1, 2)) == {7}


def some_rows() -> list[Row]:
    """One that decodes, one with drafts, a cut prompt, and a prompt's end."""
    rows = [
        Row(make_row().request, 4, 1, 0, True),
        Row(make_row(drafts=(5, 6)).request, 9, 3, 2, True),
        Row(make_row().request, 0, 7, 0, False),
        Row(make_row().request, 2, 5, 0, True),
    ]
    for slot, row in enumerate(rows):
        row.request.slot = 3 - slot
    return rows


def test_columns_hold_what_their_rows_say() -> None:
    rows = some_rows()
    columns = Rows.of(rows)
    assert (list(columns), [columns[index] for index in range(4)], len(columns)) == (rows, rows, 4)
    assert columns.slot_B.tolist() == [3, 2, 1, 0]
    assert columns.is_prefill_B.tolist() == [row.is_prefill for row in rows]
    assert columns.end_B.tolist() == [row.end for row in rows]
    assert columns.num_sampled_B.tolist() == [1, 3, 0, 1]
    assert columns.first_sample_B.tolist() == [0, 1, 4, 4]
    assert columns.num_tokens == 16
    assert columns.asks_B.tolist() == [True] * 4


def test_rows_are_taken_and_joined_in_the_order_that_is_asked_for() -> None:
    rows = some_rows()
    columns = Rows.of(rows)
    assert list(columns.take([2, 0])) == [rows[2], rows[0]]
    assert list(columns.take([])) == []
    assert list(Rows.joined((columns.take([3]), columns.take([1, 0])))) == [rows[3], rows[1], rows[0]]
    assert Rows.joined((columns.take([3]), columns.take([1]))).slot_B.tolist() == [0, 2]


def test_each_row_finds_its_own_samples() -> None:
    said = [SampledRow((7,)), SampledRow((5, 6, 8), ["x", "y", "z"]), None, SampledRow((9,))]
    rows, samples = Rows.of(some_rows()), Samples.of(said)
    assert [samples.row(rows, index) for index in range(4)] == [said[0], said[1], SampledRow(()), said[3]]
