"""Drive any number of micro-batches: whoever waits lets the next one run.

A track is a generator. What it yields is what it waits for (a Pending) or None, a place where others may run; what it
gets back is the value that arrived. Knows nothing of layers, ranks or streams. Two tracks, A computing while B's rows
travel:

    A  compute | yield pending            | wait, compute | yield ...
    B          | compute | yield pending                  | wait, compute | ...

With a lead of one turn, A is a stage ahead. A layer in three stages (p: attention's first half, a: its second half and
dispatch, e: experts and combine) then runs in the order of DeepSeek's decoding, where the exchanges never overlap:

    A  p a | e  .| p  .| a  .| e  .| ...        under A's dispatch runs B's p, under A's combine B's a
    B      p  .| a  .| e  .| p  .| a
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from ep import Pending

from .timeline import UNTIMED, Untimed

X = TypeVar("X")


def drive(
    tracks: Sequence[Generator[Pending[Any] | None, Any, X]], *, lead: int = 0, timeline: Untimed = UNTIMED
) -> list[X]:
    """Advances the tracks in turn until all have returned; their values, in order.

    lead: turns that each track is ahead of the next one. A Pending is waited for only when its track's turn comes
    again; a wait that fails raises inside its track. An exception that leaves a track closes all others and propagates.
    Every rank with the same tracks and lead waits in the same order. `timeline` is told every turn.
    """
    results: dict[int, X] = {}
    turns: deque[tuple[int, Pending[Any] | None, int]] = deque(
        (index, None, index * lead) for index in range(len(tracks))
    )
    try:
        while turns:
            index, pending, late = turns.popleft()
            if late:
                turns.append((index, None, late - 1))
                continue
            begin_ns = timeline.now()
            try:
                turns.append((index, _advance(tracks[index], pending), 0))
            except StopIteration as stop:
                results[index] = stop.value
            timeline.add("turn", index, "", begin_ns)
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
