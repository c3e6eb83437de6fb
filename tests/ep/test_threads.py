"""One rank runs at a time, in the same order every time."""

from __future__ import annotations

import time

import pytest
import torch

from ep import Kind, Tag, ThreadGroup, run_ranks
from ep.threads import MAX_RANKS


def tag(step: int, layer: int = 0) -> Tag:
    return Tag(step, layer, 0, 0, Kind.CHECK)


def test_values_come_back_in_rank_order():
    assert run_ranks(5, lambda transport: (transport.rank, transport.size)) == [(rank, 5) for rank in range(5)]


@pytest.mark.parametrize("size", [0, MAX_RANKS + 1, -3])
def test_a_size_that_one_process_does_not_hold_is_refused(size):
    with pytest.raises(ValueError, match=rf"size = {size}: one process holds 1 to 64 ranks, for example (1|64)$"):
        ThreadGroup(size)


def test_one_rank_runs_at_a_time(meet):
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


def test_the_baton_goes_to_the_next_rank_and_the_last_to_post_keeps_it(meet):
    order = []

    def fn(transport):
        for step in range(3):
            order.append((step, transport.rank))
            meet(transport, step)

    run_ranks(3, fn, timeout_s=20)
    assert order == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (2, 1), (2, 2), (2, 0)]


def test_runs_repeat_exactly_whatever_the_timing(meet):
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


def test_a_rank_may_end_while_others_still_read_what_it_sent(meet):
    assert [rows.tolist() for rows in run_ranks(3, lambda transport: meet(transport, 0))] == [[[0], [1], [2]]] * 3


def test_a_group_that_was_joined_may_start_again_with_the_same_transports(meet):
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
