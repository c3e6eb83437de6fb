"""Tracks take turns, get what they waited for, and fail together."""

from collections.abc import Callable, Generator
from typing import Any

import pytest

from dbo import drive
from ep import Pending

Track = Generator[Pending[Any] | None, Any, Any]


def arriving(log: list[str], name: str, value: object) -> Pending[Any]:
    """A Pending that notes in the log when it is waited for."""

    def finish() -> object:
        log.append(f"{name} arrives")
        return value

    return Pending(finish)


def counter(log: list[str], name: str, num_waits: int) -> Track:
    total = 0
    for index in range(num_waits):
        log.append(f"{name}{index} starts")
        total += yield arriving(log, f"{name}{index}", 10**index)
    log.append(f"{name} ends")
    return total


def test_no_tracks_give_no_results() -> None:
    assert drive([]) == []


def test_one_track_runs_straight_through() -> None:
    log: list[str] = []
    assert drive([counter(log, "a", 2)]) == [11]
    assert log == ["a0 starts", "a0 arrives", "a1 starts", "a1 arrives", "a ends"]


def test_one_track_waits_only_after_the_other_has_started() -> None:
    log: list[str] = []
    assert drive([counter(log, "a", 2), counter(log, "b", 2)]) == [11, 11]
    assert log == [
        *("a0 starts", "b0 starts"),
        *("a0 arrives", "a1 starts", "b0 arrives", "b1 starts"),
        *("a1 arrives", "a ends", "b1 arrives", "b ends"),
    ]


def test_tracks_of_different_lengths_keep_their_places() -> None:
    assert drive([counter([], "a", 3), counter([], "b", 0), counter([], "c", 1)]) == [111, 0, 1]


def test_a_bare_yield_is_a_switch_and_gets_nothing() -> None:
    log: list[str] = []

    def polite(name: str) -> Track:
        log.append(f"{name} before")
        got = yield
        log.append(f"{name} after")
        return got

    assert drive([polite("a"), polite("b")]) == [None, None]
    assert log == ["a before", "b before", "a after", "b after"]


def test_a_value_that_is_there_already_still_gives_the_turn_away() -> None:
    def ready(value: int) -> Track:
        return (yield Pending.ready(value))

    assert drive([ready(1), ready(2)]) == [1, 2]


def watched(log: list[str], name: str, work: Callable[[], Track]) -> Track:
    try:
        return (yield from work())
    finally:
        log.append(f"{name} closed")


def failing_at_once() -> Track:
    raise ValueError("expert 3 is on fire")
    yield


def test_a_failing_track_closes_the_others_and_is_the_one_that_is_raised() -> None:
    log: list[str] = []
    tracks = [
        watched(log, "a", lambda: counter([], "a", 3)),
        watched(log, "b", failing_at_once),
        watched(log, "c", lambda: counter([], "c", 3)),
    ]
    with pytest.raises(ValueError, match="expert 3 is on fire"):
        drive(tracks)
    # c had not begun: closing it runs nothing, and it cannot be resumed
    assert log == ["b closed", "a closed"]
    assert list(tracks[2]) == []


def test_a_wait_that_fails_raises_where_its_track_waited() -> None:
    log: list[str] = []

    def lost() -> object:
        raise ConnectionError("rank 2 is gone")

    def waiting() -> Track:
        try:
            yield Pending(lost)
        except ConnectionError:
            log.append("seen inside")
            raise

    with pytest.raises(ConnectionError, match="rank 2 is gone"):
        drive([waiting(), watched(log, "b", lambda: counter([], "b", 3))])
    assert log == ["seen inside", "b closed"]


def test_a_track_that_fails_while_it_is_closed_becomes_a_note_on_the_first_cause() -> None:
    def untidy() -> Track:
        try:
            yield Pending.ready(0)
        finally:
            raise RuntimeError("buffer still in use")

    with pytest.raises(ValueError, match="expert 3 is on fire") as caught:
        drive([untidy(), failing_at_once()])
    assert caught.value.__notes__ == ["track 0 raised while it was closed: RuntimeError('buffer still in use')"]


def test_an_interrupt_closes_every_track() -> None:
    log: list[str] = []

    def interrupted() -> object:
        raise KeyboardInterrupt

    def waiting() -> Track:
        yield Pending(interrupted)

    with pytest.raises(KeyboardInterrupt):
        drive([waiting(), watched(log, "b", lambda: counter([], "b", 3))])
    assert log == ["b closed"]
