"""The counts of requests that hold a slot, and which tokens may end one."""

import numpy as np
import pytest

from runtime.requests.ledger import Ledger


def opened(*stops: tuple[int, ...]) -> Ledger:
    """A slot for each of these sets of stop tokens."""
    ledger = Ledger(8, failed_token=-1)
    for slot, stop_ids in enumerate(stops):
        ledger.open(slot, num_host=5, num_computed=4, max_len=9, room=16, asks=slot == 1, stop_ids=stop_ids)
    return ledger


def counts(ledger: Ledger, slot: int) -> tuple[int, ...]:
    columns = (ledger.num_host_S, ledger.num_pending_S, ledger.num_computed_S, ledger.in_flight_S)
    return tuple(int(column[slot]) for column in columns)


def test_launched_rows_count_until_they_are_read():
    ledger = opened((), (), ())
    slot_B, num_tokens_B, num_sampled_B = np.array([2, 0]), np.array([1, 3]), np.array([1, 0])
    ledger.launched(slot_B, num_tokens_B, num_sampled_B)
    assert [counts(ledger, slot) for slot in range(3)] == [(5, 0, 7, 1), (5, 0, 4, 0), (5, 1, 5, 1)]
    ledger.launched(slot_B[:1], num_tokens_B[:1], num_sampled_B[:1])
    ledger.read(slot_B, num_sampled_B)
    assert [counts(ledger, slot) for slot in range(3)] == [(5, 0, 7, 0), (5, 0, 4, 0), (5, 1, 6, 1)]


def test_a_row_with_drafts_leaves_one_token_pending():
    ledger = opened(())
    ledger.launched(np.array([0]), np.array([3]), np.array([3]))
    assert counts(ledger, 0) == (5, 1, 7, 1)


def test_a_token_is_watched_as_long_as_someone_in_a_slot_may_end_by_it():
    ledger = opened((7, 8), (8,))
    assert ledger.watched.keys() == {-1, 7, 8}
    ledger.is_running_S[0] = False
    ledger.close(0, stop_ids=(7, 8))
    assert ledger.watched.keys() == {-1, 8}
    ledger.is_running_S[1] = False
    ledger.close(1, stop_ids=(8,))
    assert ledger.watched.keys() == {-1}, "a failed position ends any request"


def test_a_slot_is_entered_with_nothing_in_flight():
    ledger = opened((), ())
    ledger.launched(np.array([1]), np.array([1]), np.array([1]))
    ledger.open(1, num_host=3, num_computed=0, max_len=4, room=4, asks=False, stop_ids=())
    assert (counts(ledger, 1), bool(ledger.asks_S[1]), int(ledger.room_S[1])) == ((3, 0, 0, 0), False, 4)


def test_a_slot_whose_request_runs_is_not_closed():
    with pytest.raises(AssertionError, match="slot 0 is closed, and its request runs"):
        opened(()).close(0, stop_ids=())
