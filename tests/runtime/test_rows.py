"""How far samples reach: accepted drafts, the ends of a request, failed positions."""

import pytest

from runtime.request import FinishReason, Request, ending_ids
from runtime.rows import FAILED_TOKEN, Row, Verdict, judge
from runtime.sampling_params import SamplingParams


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
