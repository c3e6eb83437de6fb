"""Drive any number of micro-batches: whoever waits lets the next one run.

A track is a generator. What it yields is what it waits for (a Pending) or None, a place where others may run; what it
gets back is the value that arrived. Knows nothing of layers, ranks or streams. Two tracks, A computing while B's rows
travel:

    A  compute | yield pending            | wait, compute | yield ...
    B          | compute | yield pending                  | wait, compute | ...
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from ep import Pending

X = TypeVar("X")


def drive(tracks: Sequence[Generator[Pending[Any] | None, Any, X]]) -> list[X]:
    """Advances the tracks in turn until all have returned; their values, in order.

    A Pending is waited for only when its track's turn comes again; a wait that fails raises inside its track. An
    exception that leaves a track closes all others and propagates. Every rank with the same tracks waits in the same
    order.
    """
    results: dict[int, X] = {}
    turns: deque[tuple[int, Pending[Any] | None]] = deque((index, None) for index in range(len(tracks)))
    try:
        while turns:
            index, pending = turns.popleft()
            try:
                turns.append((index, _advance(tracks[index], pending)))
            except StopIteration as stop:
                results[index] = stop.value
    except BaseException as cause:
        _close(tracks, cause)
        raise
    return [results[index] for index in range(len(tracks))]


def _advance(track: Generator[Pending[Any] | None, Any, Any], pending: Pending[Any] | None) -> Pending[Any] | None:
    """Resumes a track with what it waited for; returns what it waits for next."""
    if pending is None:
        return next(track)
    try:
        value = pending.wait()
    except BaseException as failure:
        return track.throw(failure)
    return track.send(value)


def _close(tracks: Sequence[Generator[Any, Any, Any]], cause: BaseException) -> None:
    """Ends what is unfinished; the first cause stays the one that is raised, later ones become notes on it."""
    for index, track in enumerate(tracks):
        try:
            track.close()
        except Exception as error:
            cause.add_note(f"track {index} raised while it was closed: {error!r}")
