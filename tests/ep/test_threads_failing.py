"""Whatever goes wrong on one rank ends all, each with an error that names the culprit, and never hangs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from ep import ExchangeMismatch, Kind, PeerFailed, Tag, TagMismatch, ThreadGroup, TransportError, run_ranks


def tag(step: int, layer: int = 0) -> Tag:
    return Tag(step, layer, 0, 0, Kind.CHECK)


def swap(transport, step, *, send_splits=None, dtype=torch.float32, width=2):
    """Everybody to everybody, one row each unless told otherwise."""
    ones = [1] * transport.size
    send_splits = send_splits or ones
    return transport.all_to_all(
        torch.empty(transport.size, width, dtype=dtype),
        torch.ones(sum(send_splits), width, dtype=dtype),
        recv_splits=ones,
        send_splits=send_splits,
        tag=tag(step),
    ).wait()


def culprits(errors):
    return [getattr(error, "culprit", None) for error in errors]


def test_a_wrong_tag_is_raised_on_every_rank_and_names_the_odd_one(meet, errors_of):
    errors, raised = errors_of(4, lambda transport: meet(transport, 7, layer=9 if transport.rank == 2 else 1))
    assert all(isinstance(error, TagMismatch) for error in errors)
    assert culprits(errors) == [2] * 4
    assert [error.rank for error in errors] == [0, 1, 2, 3]
    assert (raised.expected, raised.found, raised.step) == (tag(7, 1), tag(7, 9), 7)


def test_of_two_ranks_the_one_that_came_last_is_out_of_step(meet, errors_of):
    errors, raised = errors_of(2, lambda transport: meet(transport, transport.rank))
    assert culprits(errors) == [1, 1]
    assert (raised.expected.step, raised.found.step) == (0, 1)


def test_ranks_that_wait_for_each_other_crosswise_are_out_of_step_and_do_not_hang(meet, errors_of):
    def fn(transport):
        layers = (0, 1) if transport.rank == 0 else (1, 0)
        for layer in layers:
            meet(transport, 0, layer=layer)

    errors, _ = errors_of(2, fn)
    assert all(isinstance(error, TagMismatch) for error in errors)


def test_a_rank_that_left_an_exchange_out_is_out_of_step(meet, errors_of):
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
def test_a_rank_that_raises_ends_the_others_and_its_own_error_comes_out(meet, errors_of, culprit):
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


def test_a_rank_that_raises_before_others_began_still_lets_each_hear_of_it(meet, errors_of):
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


def test_a_rank_that_ended_while_others_wait_is_seen_at_once(meet, errors_of):
    def fn(transport):
        meet(transport, 0)
        if transport.rank != 1:
            meet(transport, 1)

    errors, raised = errors_of(3, fn)
    assert isinstance(raised, PeerFailed)
    assert errors[1] is None
    assert culprits([errors[0], errors[2]]) == [1, 1]
    assert "rank 1 ended after 1 exchanges; ranks [0, 2] need it in CHECK(step 1" in str(raised)


def test_posting_what_an_ended_rank_never_will_fails_at_once(errors_of):
    def fn(transport):
        if transport.rank:
            transport.all_gather(torch.tensor([1]), tag=tag(0))
            pytest.fail("posted to nobody")

    errors, _ = errors_of(3, fn)
    assert culprits(errors) == [None, 0, 0]


def test_a_closed_rank_is_as_good_as_ended(meet, errors_of):
    def fn(transport):
        meet(transport, 0)
        if transport.rank == 0:
            transport.close()
            transport.close()
            return
        meet(transport, 1)

    errors, _ = errors_of(2, fn)
    assert culprits(errors) == [None, 0]


def test_an_abort_reaches_every_rank(meet, errors_of):
    def fn(transport):
        meet(transport, 0)
        if transport.rank == 2:
            transport.abort(RuntimeError("poisoned"))
        meet(transport, 1)

    errors, raised = errors_of(3, fn)
    assert culprits(errors) == [2, 2, 2]
    assert str(raised) == "poisoned"


def test_after_an_abort_nothing_is_handed_out_that_was_complete_before(meet):
    def fn(transport):
        pending = transport.all_gather(torch.tensor([1]), tag=tag(0))
        meet(transport, 1)
        transport.abort(RuntimeError(f"poisoned by {transport.rank}"))
        with pytest.raises(PeerFailed):
            pending.wait()
        survived.append(transport.rank)

    survived = []
    with pytest.raises(RuntimeError, match="poisoned by 2"):
        run_ranks(3, fn, timeout_s=20)
    assert survived == [2]


def test_an_error_caught_by_one_rank_still_fails_the_run(meet):
    def fn(transport):
        try:
            meet(transport, 0, layer=transport.rank)
        except TransportError:
            return "went on"

    with pytest.raises(TagMismatch):
        run_ranks(2, fn, timeout_s=20)


def test_a_broken_group_stays_broken(meet):
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


def test_a_rank_that_hangs_is_named_with_its_place_and_the_others_end_without_it(meet):
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
    with pytest.raises(PeerFailed, match=r"rank 1 made no exchange for 0\.2 s and is in .*; rank 0 waits for CHECK"):
        group.join()
    assert sorted(errors) == [0, 2]
    assert culprits(errors.values()) == [1, 1]
    release.set()
    group._threads[1].join(5)
    assert errors[1].culprit == 1


def test_a_busy_group_is_not_taken_for_a_hanging_one(meet):
    def fn(transport):
        for step in range(15):
            time.sleep(0.1)
            meet(transport, step)

    run_ranks(4, fn, timeout_s=1.2)  # longer than that all in all


def test_an_interrupt_of_the_caller_ends_every_rank_and_goes_on_upwards(meet):
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


def test_no_thread_outlives_a_run_that_failed(meet):
    for _ in range(3):
        with pytest.raises(TagMismatch):
            run_ranks(16, lambda transport: meet(transport, 0, layer=transport.rank == 5))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_stop_from_outside_wakes_the_waiting_even_if_one_hangs(meet):
    began, release, heard = threading.Event(), threading.Event(), threading.Event()

    def fn(transport):
        if transport.rank == 1:
            began.set()
            release.wait(20)
        try:
            meet(transport, 0)
        except TransportError:
            heard.set()
            raise

    group: ThreadGroup[None] = ThreadGroup(2)
    group.start(fn)
    assert began.wait(10)
    group.stop(InterruptedError("enough"))
    assert heard.wait(10)
    release.set()
    with pytest.raises(InterruptedError, match="enough"):
        group.join()
