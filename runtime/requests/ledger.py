"""What a step looks at of every request that holds a slot: a column a field, a line a slot.

A step of a full rank touches hundreds of requests. As columns that is a few operations of numpy; as objects it would be
hundreds of places in memory, most of them cold. What a step touches of few requests only (pages, drafts, digests)
stays with the request. Knows counts by slot; does not know requests, nor when a line is opened and closed (`roster`).

Shapes: S slots, B rows of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
"""One axis."""
Mask = NDArray[np.bool_]


class Ledger:
    """One rank's.

    is_running_S     the slot's request runs; not so when it is parked, or when the slot is free
    asks_S           its samples take more than the largest logit (see `SamplingParams.is_plain`)
    num_host_S       its tokens that the host knows
    num_pending_S    those sampled by launched steps and not finished yet: at most one for each step in flight
    num_computed_S   those whose latents are in the cache, or that launched steps are putting there
    in_flight_S      launched steps that hold a row of it and are not finished yet
    max_len_S        prompt and output together are never longer
    room_S           positions that its pages have
    watched          tokens after which some request may end, and how many: those of requests that hold a slot, and
                     `failed_token`, which ends any
    """

    def __init__(self, num_slots: int, *, failed_token: int) -> None:
        self.is_running_S: Mask = np.zeros(num_slots, dtype=np.bool_)
        self.asks_S: Mask = np.zeros(num_slots, dtype=np.bool_)
        counts = np.zeros((6, num_slots), dtype=np.int64)
        self.num_host_S, self.num_pending_S, self.num_computed_S = counts[:3]
        self.in_flight_S, self.max_len_S, self.room_S = counts[3:]
        self.watched: Counter[int] = Counter((failed_token,))

    def open(
        self,
        slot: int,
        *,
        num_host: int,
        num_computed: int,
        max_len: int,
        room: int,
        asks: bool,
        stop_ids: Iterable[int],
    ) -> None:
        """A request enters the slot and runs; nothing of it is in flight."""
        self.is_running_S[slot] = True
        self.asks_S[slot] = asks
        self.num_host_S[slot] = num_host
        self.num_pending_S[slot] = 0
        self.num_computed_S[slot] = num_computed
        self.in_flight_S[slot] = 0
        self.max_len_S[slot] = max_len
        self.room_S[slot] = room
        self.watched.update(stop_ids)

    def close(self, slot: int, *, stop_ids: Iterable[int]) -> None:
        """Its request left the slot."""
        assert not self.is_running_S[slot], f"slot {slot} is closed, and its request runs"
        self.watched -= Counter(stop_ids)

    def launched(self, slot_B: Column, num_tokens_B: Column, num_sampled_B: Column) -> None:
        """Rows of these requests are on their way; no slot occurs twice."""
        self.num_computed_S[slot_B] += num_tokens_B
        self.num_pending_S[slot_B] += num_sampled_B > 0
        self.in_flight_S[slot_B] += 1

    def read(self, slot_B: Column, num_sampled_B: Column) -> None:
        """They are not in flight any more."""
        self.in_flight_S[slot_B] -= 1
        self.num_pending_S[slot_B] -= num_sampled_B > 0
