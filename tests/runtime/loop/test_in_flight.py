"""Which steps are read, which are clean here, and which are launched again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ep import Terms
from runtime.forward.readback import HereAlready
from runtime.loop.in_flight import InFlight
from runtime.loop.launcher import Launched, OnHost
from runtime.requests.rows import Rows
from runtime.scheduling.heartbeat import HeartbeatState, Vote, decide


def launched(step: int, overflow: bool | None) -> Launched:
    """A step without rows. overflow: None where nothing can be left behind."""
    plan, _ = decide([Vote(sequence=step, epoch=0, config_hash=0, decode_tokens=3, unfinished=1)], HeartbeatState())
    flags = {} if overflow is None else {"overflow": torch.tensor(overflow)}
    return Launched(
        plan=plan,
        terms=Terms(bucket=plan.bucket),
        rows=Rows.of(()),
        sampled=None,
        counts_LE=torch.zeros(0, 0, dtype=torch.int64),
        host=OnHost(tuple(flags), HereAlready(list(flags.values()))),
        own_us=0,
        waited_us=0,
    )


def flight(*flags: bool | None) -> InFlight:
    """Steps 0, 1, .. are launched."""
    steps = InFlight()
    for step, overflow in enumerate(flags):
        steps.add(launched(step, overflow))
    return steps


@pytest.mark.parametrize(
    ("flags", "clean"),
    [
        ([None, None, None], 2),
        ([False, False, False], 2),
        ([False, False, True], 1),
        ([False, True, False], 0),  # a clean step behind an unclean one counts for nothing: it has read what that wrote
        ([True, False, False], -1),
        ([True, True, True], -1),
    ],
)
def test_steps_are_clean_up_to_the_first_in_which_something_was_left_behind(flags: Sequence[bool | None], clean: int):
    steps = flight(*flags)
    assert (steps.last_read, steps.last_clean) == (-1, -1)
    for _ in flags:
        steps.read()
    assert (steps.last_read, steps.last_clean, steps.num_overflows) == (2, clean, flags.count(True))
    assert [step.launched.plan.step for step in steps.take_clean(clean)] == list(range(clean + 1))
    assert len(steps) == 2 - clean


def test_all_that_is_in_flight_is_launched_again_read_or_not_in_its_order():
    steps = flight(False, True, True, False)
    for _ in range(2):
        steps.read()
    assert len(steps.take_clean(0)) == 1
    assert (len(steps), len(steps.unread), steps.buckets) == (3, 2, [3, 3, 3])
    again = steps.discard()
    assert ([step.plan.step for step in again], len(steps)) == ([1, 2, 3], 0)
    assert steps.num_overflows == 2, "the flags of discarded steps count as well"
    for step in again:
        steps.add(launched(step.plan.step, False))
        steps.read()
    assert (steps.last_read, steps.last_clean, steps.num_overflows) == (3, 3, 2)


def test_with_nothing_in_flight_there_is_nothing_to_launch_again():
    steps = flight(False)
    steps.read()
    steps.take_clean(0)
    assert (steps.discard(), steps.last_read, steps.last_clean, steps.take_clean(9)) == ([], 0, 0, [])


def test_a_step_that_all_ranks_but_this_one_must_repeat_is_not_clean_here_either():
    """Until it is read again: the first launch does not count any more."""
    steps = flight(False, False)
    steps.read()
    steps.read()
    assert steps.last_clean == 1
    steps.take_clean(0)
    [again] = steps.discard()
    assert (steps.last_read, steps.last_clean) == (0, 0)
    steps.add(again)
    steps.read()
    assert (steps.last_read, steps.last_clean) == (1, 1)
