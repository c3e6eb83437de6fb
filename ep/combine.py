"""The two ways back: what the expert ranks return, and who weighs and adds it up.

    ranks   the expert rank weighs and adds its slots, one row per token and rank returns; nodes and sources add on
    slots   one row per token and slot returns all the way, and the source alone weighs and adds

Legend: T tokens here, D model, K top-k, N rows that landed, M (row, slot) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from .config import CombineMode
from .hops import Hop, PairRows, relay
from .sums import Sums
from .transport import Pending, Tag


@dataclass(frozen=True, slots=True, eq=False)
class Journey:
    """The way that rows came, to be gone back."""

    legs: Sequence[tuple[Hop, Any]]
    """(hop, its trail), in the order in which they were sent."""
    weights_TK: Tensor
    """Of the tokens that were sent."""
    landed_weights_NK: Tensor
    """Of the rows that landed in the end; not in a buffer, because what is given back may overwrite it."""


Combine = Callable[[PairRows, Journey, Tag], Pending[Sums]]
"""combine(pairs, journey, tag) -> a result for each token that was sent."""


def combine_ranks(pairs: PairRows, journey: Journey, tag: Tag) -> Pending[Sums]:
    """Weigh and add in top-k order here, in the order of ranks and of nodes on the way."""
    sums = Sums(pairs.rows_MD, pairs.index_NK, journey.landed_weights_NK, pairs.pairs)
    return relay(sums, [partial(hop.back_rows, trail=trail, tag=tag) for hop, trail in reversed(journey.legs)])


def combine_slots(pairs: PairRows, journey: Journey, tag: Tag) -> Pending[Sums]:
    """Weigh and add in top-k order at the source, wherever the slots are."""
    back = relay(pairs, [partial(hop.back_pairs, trail=trail, tag=tag) for hop, trail in reversed(journey.legs)])
    return back.then(lambda pairs: Sums(pairs.rows_MD, pairs.index_NK, journey.weights_TK))


COMBINES: dict[CombineMode, Combine] = {"ranks": combine_ranks, "slots": combine_slots}
