"""One rank runs at a time, in the same order every time; whatever goes wrong ends all ranks and names the culprit."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from ep import ExchangeMismatch, Kind, PeerFailed, Tag, TagMismatch, ThreadGroup, TransportError, run_ranks
from ep.threads import MAX_RANKS


def tag(step: int, layer: int = 0) -> Tag:
    return Tag(step, layer, 0, 0, Kind.CHECK)


def meet(transport, step: int, *, layer: int = 0):
    """One exchange of everybody with everybody."""
    row = torch.tensor([transport.rank])
    return transport.all_gather(row, tag=tag(step, layer)).wait()


def swap(transport, step, *, send_splits=None, dtype=torch.float32, width=2):
    """Like meet, with rows; send_splits of one row each unless given."""
    ones = [1] * transport.size
    send_splits = send_splits or ones
    return transport.all_to_all(
        torch.empty(transport.size, width, dtype=dtype),
        torch.ones(sum(send_splits), width, dtype=dtype),
        recv_splits=ones,
        send_splits=send_splits,
        tag=tag(step),
    ).wait()


# How it runs.


def test_values_come_back_in_rank_order():
    assert run_ranks(5, lambda transport: (transport.rank, transport.size)) == [(rank, 5) for rank in range(5)]


@pytest.mark.parametrize("size", [0, MAX_RANKS + 1, -3])
def test_a_size_that_one_process_does_not_hold_is_refused(size):
    with pytest.raises(ValueError, match=rf"size = {size}: one process holds 1 to 64 ranks, for example (1|64)$"):
        ThreadGroup(size)


def test_one_rank_runs_at_a_time():
    running, most = [], []

    def fn(transport):
        for step in range(5):
            running.append(transport.rank)
            most.append(len(running))
            time.sleep(0.0005)
            running.remove(transport.rank)
            meet(transport, step)

    run_ranks(4, fn, timeout_s=20)
    assert set(most) == {1}


def test_the_baton_goes_to_the_next_rank_and_the_last_to_post_keeps_it():
    order = []

    def fn(transport):
        for step in range(3):
            order.append((step, transport.rank))
            meet(transport, step)

    run_ranks(3, fn, timeout_s=20)
    assert order == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (2, 1), (2, 2), (2, 0)]


def test_runs_repeat_exactly_whatever_the_timing():
    def trace(delay_rank):
        events = []

        def fn(transport):
            for step in range(6):
                if transport.rank == delay_rank:
                    time.sleep(0.001)
                events.append((transport.rank, step))
                pending = transport.all_gather(torch.tensor([step]), tag=tag(step, 0))
                if (transport.rank + step) % 3:
                    meet(transport, step, layer=1)
                    pending.wait()
                else:
                    pending.wait()
                    events.append((transport.rank, -step))
                    meet(transport, step, layer=1)

        run_ranks(5, fn, timeout_s=20)
        return events

    assert trace(0) == trace(3) == trace(None)


def test_a_wait_for_something_complete_does_not_give_the_baton_away():
    order = []

    def fn(transport):
        first = transport.all_gather(torch.tensor([1]), tag=tag(0))
        second = transport.all_gather(torch.tensor([1]), tag=tag(1))
        second.wait()
        order.append(transport.rank)
        first.wait()
        order.append(transport.rank)

    run_ranks(3, fn, timeout_s=20)
    assert order == [2, 2, 0, 0, 1, 1]


def test_a_rank_may_end_while_others_still_read_what_it_sent():
    assert [rows.tolist() for rows in run_ranks(3, lambda transport: meet(transport, 0))] == [[[0], [1], [2]]] * 3


def test_a_group_that_was_joined_may_start_again_with_the_same_transports():
    group: ThreadGroup[int] = ThreadGroup(3, timeout_s=20)
    for step in range(3):
        group.start(lambda transport, step=step: int(meet(transport, step).sum()) + step)
        assert group.join() == [3 + step] * 3
    assert group.broken is None


def test_values_of_an_earlier_run_are_not_overwritten():
    group: ThreadGroup[int] = ThreadGroup(2)
    group.start(lambda transport: transport.rank)
    first = group.join()
    group.start(lambda transport: transport.rank + 10)
    assert (group.join(), first) == ([10, 11], [0, 1])


# How it fails.


def culprits(errors):
    return [getattr(error, "culprit", None) for error in errors]


def test_a_wrong_tag_is_raised_on_every_rank_and_names_the_odd_one(errors_of):
    errors, raised = errors_of(4, lambda transport: meet(transport, 7, layer=9 if transport.rank == 2 else 1))
    assert all(isinstance(error, TagMismatch) for error in errors)
    assert culprits(errors) == [2] * 4
    assert [error.rank for error in errors] == [0, 1, 2, 3]
    assert (raised.expected, raised.found, raised.step) == (tag(7, 1), tag(7, 9), 7)


def test_of_two_ranks_the_one_that_came_last_is_out_of_step(errors_of):
    errors, raised = errors_of(2, lambda transport: meet(transport, transport.rank))
    assert culprits(errors) == [1, 1]
    assert (raised.expected.step, raised.found.step) == (0, 1)


def test_ranks_that_wait_for_each_other_crosswise_are_out_of_step_and_do_not_hang(errors_of):
    def fn(transport):
        layers = (0, 1) if transport.rank == 0 else (1, 0)
        for layer in layers:
            meet(transport, 0, layer=layer)

    errors, _ = errors_of(2, fn)
    assert all(isinstance(error, TagMismatch) for error in errors)


def test_a_rank_that_left_an_exchange_out_is_out_of_step(errors_of):
    def fn(transport):
        for step in range(4):
            if (transport.rank, step) != (1, 2):
                meet(transport, step)

    errors, _ = errors_of(3, fn)
    assert culprits(errors) == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "torch.float64"),
        ({"width": 3}, "[3]"),
        ({"send_splits": [2, 2, 2]}, "rank 1 sends 2 rows to rank 0, which expects 1"),
    ],
    ids=["dtype", "shape", "splits"],
)
def test_a_rank_with_other_data_is_named_on_every_rank(errors_of, change, words):
    errors, _ = errors_of(3, lambda transport: swap(transport, 0, **(change if transport.rank == 1 else {})))
    assert all(isinstance(error, ExchangeMismatch) for error in errors)
    assert culprits(errors) == [1, 1, 1]
    assert all(words in error.cause for error in errors)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_raises_ends_the_others_and_its_own_error_comes_out(errors_of, culprit):
    def fn(transport):
        meet(transport, 0)
        if transport.rank == culprit:
            raise KeyError("lost")
        meet(transport, 1)

    errors, raised = errors_of(3, fn)
    assert raised is errors[culprit]
    assert isinstance(raised, KeyError)
    assert f"raised on rank {culprit} of 3" in raised.__notes__
    others = [error for rank, error in enumerate(errors) if rank != culprit]
    assert all(isinstance(error, PeerFailed) for error in others)
    assert culprits(others) == [culprit] * 2
    assert all(error.cause == "raised KeyError: 'lost'" for error in others)


def test_a_rank_that_raises_before_others_began_still_lets_each_hear_of_it(errors_of):
    def fn(transport):
        if transport.rank == 0:
            raise OSError("no weights")
        meet(transport, 0)

    errors, raised = errors_of(3, fn)
    assert str(raised) == "no weights"
    assert culprits(errors[1:]) == [0, 0]


def test_what_was_complete_before_a_failure_is_not_handed_out_after_it(errors_of):
    def fn(transport):
        pending = transport.all_gather(torch.tensor([1]), tag=tag(0))
        if transport.rank == 1:
            raise OSError("late")
        pending.wait()

    errors, _ = errors_of(2, fn)
    assert culprits(errors) == [1, None]


def test_a_rank_that_ended_while_others_wait_is_seen_at_once(errors_of):
    def fn(transport):
        meet(transport, 0)
        if transport.rank != 1:
            meet(transport, 1)

    errors, raised = errors_of(3, fn)
    assert isinstance(raised, PeerFailed)
    assert errors[1] is None
    assert culprits([errors[0], errors[2]]) == [1, 1]
    assert "rank 1 ended after 1 exchanges; ranks [2] need it in CHECK(step 1" in str(raised)


def test_posting_what_an_ended_rank_never_will_fails_at_once(errors_of):
    def fn(transport):
        if transport.rank:
            transport.all_gather(torch.tensor([1]), tag=tag(0))
            pytest.fail("posted to nobody")

    errors, _ = errors_of(3, fn)
    assert culprits(errors) == [None, 0, 0]


def test_a_closed_rank_is_as_good_as_ended(errors_of):
    def fn(transport):
        meet(transport, 0)
        if transport.rank == 0:
            transport.close()
            transport.close()
            return
        meet(transport, 1)

    errors, _ = errors_of(2, fn)
    assert culprits(errors) == [None, 0]


def test_an_abort_reaches_every_rank(errors_of):
    def fn(transport):
        meet(transport, 0)
        if transport.rank == 2:
            transport.abort(RuntimeError("poisoned"))
        meet(transport, 1)

    errors, raised = errors_of(3, fn)
    assert culprits(errors) == [2, 2, 2]
    assert str(raised) == "poisoned"


def test_an_error_caught_by_one_rank_still_fails_the_run():
    def fn(transport):
        try:
            meet(transport, 0, layer=transport.rank)
        except TransportError:
            return "went on"

    with pytest.raises(TagMismatch):
        run_ranks(2, fn, timeout_s=20)


def test_a_broken_group_stays_broken():
    def fn(transport):
        for _ in range(3):
            with pytest.raises(TagMismatch):
                meet(transport, 0, layer=transport.rank)

    group: ThreadGroup[None] = ThreadGroup(2, timeout_s=20)
    group.start(fn)
    with pytest.raises(TagMismatch):
        group.join()
    assert isinstance(group.broken, TagMismatch)
    with pytest.raises(TagMismatch):
        group.start(fn)


def test_a_rank_that_hangs_is_named_with_the_place_and_the_waiting_ranks():
    release = threading.Event()
    errors = {}

    def stuck_here():
        release.wait(20)

    def fn(transport):
        if transport.rank == 1:
            stuck_here()
        try:
            meet(transport, 4)
        except PeerFailed as error:
            errors[transport.rank] = error
            raise

    group: ThreadGroup[None] = ThreadGroup(3, timeout_s=0.2)
    group.start(fn)
    threading.Timer(0.5, release.set).start()
    with pytest.raises(PeerFailed, match=r"rank 1 made no exchange for 0\.2 s and is in .*; rank 0 waits for CHECK"):
        group.join()
    assert culprits(errors.values()) == [1, 1, 1]


def test_a_busy_group_is_not_taken_for_a_hanging_one():
    def fn(transport):
        for step in range(20):
            time.sleep(0.005)
            meet(transport, step)

    run_ranks(4, fn, timeout_s=0.3)


def test_an_interrupt_of_the_caller_ends_every_rank_and_goes_on_upwards():
    ended = []

    def fn(transport):
        try:
            for step in range(10**9):
                if (transport.rank, step) == (1, 3):
                    os.kill(os.getpid(), signal.SIGINT)
                meet(transport, step)
        except TransportError as error:
            ended.append((transport.rank, str(error).partition(": ")[2]))
            raise

    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, fn, timeout_s=20)
    assert sorted(ended) == [(rank, "stopped from outside: KeyboardInterrupt()") for rank in range(3)]


def test_no_thread_outlives_a_run_that_failed():
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(TagMismatch):
            run_ranks(16, lambda transport: meet(transport, 0, layer=transport.rank == 5))
    assert threading.active_count() == before
