"""(row, slot) pairs in the order in which experts compute them: sorted by slot, what belongs to one slot side by side.

Sizes are fixed and counts stay on the device, so that nobody has to ask how many rows came. Memory is passed in.

    slots_NK   [[1, -1], [0, 1], [-1, -1], [1, 0]], 2 local slots
    starts_L   [0, 2, 5]                         where a slot's places begin, and where the last one's end
    rows_M     [1, 3 | 0, 1, 3 | ...]            pairs of a slot in (row, top-k) order; what follows is anything
    places_NK  [[2, -1], [0, 3], [-1, -1], [4, 1]]

Knows no weights and no values. Legend: N rows received, K top-k, M places of pairs, L local slots, C chunks of pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 256
"""Pairs that are counted together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairGroups:
    """Where pairs are, and the memory to find out. All int32."""

    starts_L: Tensor
    """[L + 1] where each slot's places begin; the last is the number of pairs."""
    rows_M: Tensor
    """The row of each place; M = N x min(K, L). Past the last pair it may hold anything."""
    places_NK: Tensor
    """The place of each pair, -1 for none."""
    chunk_counts_CL: Tensor
    """Pairs of each chunk and slot."""

    @classmethod
    def empty(cls, num_rows: int, top_k: int, num_slots: int, *, device: torch.device | str) -> "PairGroups":
        """Memory for `num_rows` rows, not filled. A row has no slot twice, so that places may be fewer than pairs."""
        num_pairs = num_rows * top_k

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            starts_L=ints(num_slots + 1),
            rows_M=ints(num_rows * min(top_k, num_slots)),
            places_NK=ints(num_rows, top_k),
            chunk_counts_CL=ints(-(-num_pairs // CHUNK), num_slots),
        )

    @classmethod
    def of_one_slot(cls, num_rows: int, *, device: torch.device | str) -> "PairGroups":
        """Filled: every row belongs to the one slot that there is."""
        rows_M = torch.arange(num_rows, dtype=torch.int32, device=device)
        return cls(
            starts_L=torch.arange(2, dtype=torch.int32, device=device) * num_rows,
            rows_M=rows_M,
            places_NK=rows_M.unsqueeze(1),
            chunk_counts_CL=rows_M[:0].unsqueeze(1),
        )

    @property
    def num_slots(self) -> int:
        return self.starts_L.shape[0] - 1

    @property
    def num_places(self) -> int:
        """M: places for pairs, however many there are."""
        return self.rows_M.shape[0]


def group_pairs(slots_NK: Tensor, groups: PairGroups) -> None:
    """Fill `groups`, in torch. slots_NK: local slots, -1 none."""
    slots_P = slots_NK.flatten()
    order_M = torch.where(slots_P < 0, groups.num_slots, slots_P).argsort(stable=True)
    starts_L = torch.bincount(slots_P + 1, minlength=groups.num_slots + 1).cumsum(0)
    groups.starts_L.copy_(starts_L - starts_L[0])
    num_pairs = int(groups.starts_L[-1])
    order_M = order_M[:num_pairs]
    groups.rows_M[:num_pairs] = torch.floor_divide(order_M, slots_NK.shape[1]).to(torch.int32)
    groups.places_NK.fill_(-1)
    places_P = torch.arange(num_pairs, dtype=torch.int32, device=slots_NK.device)
    groups.places_NK.view(-1)[order_M] = places_P
