"""Whether ranks that exchange something are at the same place of the program, from what they say."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import TagMismatch
from .posts import odd_one_out
from .transport import Kind, Tag


def check_tags(words: Sequence[tuple[int, ...]], *, rank: int, ranks: Sequence[int] | None = None) -> None:
    """Raise TagMismatch unless all `ranks` (None: 0, 1, ..) said the same tag; `rank` is the one that asks.

    All hear the same, so all blame the same: the smaller party, the higher rank of two. Holds on transports that do not
    compare tags themselves.
    """
    ranks = range(len(words)) if ranks is None else ranks
    odd = odd_one_out(words, range(len(words)))
    if odd is not None:
        place, expected = odd
        step = words[ranks.index(rank)][0]
        raise TagMismatch(ranks[place], _tag(expected), _tag(words[place]), rank=rank, step=step)


def _tag(words: tuple[int, ...]) -> Tag:
    """A rank at another place may have sent anything: a kind that is none stays a number."""
    step, layer, track, number, kind = words
    return Tag(step, layer, track, number, Kind(kind) if kind in set(Kind) else kind)  # type: ignore[arg-type]
