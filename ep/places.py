"""Where rows go when every member gets a block of a fixed size: index math without a number that the host must know.

A block begins with a header, then places for `capacity` rows. Place 0 of the first block is place 0 of all, and so on;
one more place at the very end takes whatever has none: it does not travel. A row that does not fit has no place.

    2 members, capacity 2            block of member 0        block of member 1
    rows 0 1 2 to member 0           header  row 0  row 1     header  row 2  nothing
    row 2 to member 1                0       1      2         3       4      5

Legend: T rows, K top-k, R members, P places of all blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import by_row, ranks_of


class RowPlaces(NamedTuple):
    """The rows that leave, by place and by row."""

    rows_P: Tensor
    """int64: the row in each place, T for a header or nothing."""
    fits_TR: Tensor
    """bool: row t goes to member r and has a place there."""
    counts_R: Tensor
    """int64: places taken in each block."""
    overflow: Tensor
    """bool scalar: some row has no place."""
    back_TJ: Tensor
    """The places of each row in ascending order, then -1; also -1 where there was none left. J = min(K, R)."""


def row_places(slots_TK: Tensor, *, slots_per_member: int, num_members: int, capacity: int) -> RowPlaces:
    """Rows in ascending order in each block; `layout.send_layout` with blocks."""
    num_rows, device = slots_TK.shape[0], slots_TK.device
    goes_TR = torch.zeros(num_rows, num_members + 1, dtype=torch.bool, device=device)
    goes_TR.scatter_(1, ranks_of(slots_TK, slots_per_member) + 1, True)  # column 0 takes the -1s
    goes_TR = goes_TR[:, 1:]
    place_TR = goes_TR.cumsum(0) - 1
    fits_TR = goes_TR & (place_TR < capacity)
    num_places = num_members * (1 + capacity)
    target_TR = _in_blocks(place_TR, capacity).where(fits_TR, num_places)
    row_TR = torch.arange(num_rows, device=device).unsqueeze(1).expand(num_rows, num_members)
    rows_P = torch.full((num_places + 1,), num_rows, device=device)
    rows_P.scatter_(0, target_TR.flatten(), row_TR.flatten())
    back_TJ = by_row(target_TR.where(fits_TR, -1), goes_TR, most=min(slots_TK.shape[1], num_members))
    return RowPlaces(rows_P[:num_places], fits_TR, fits_TR.sum(0), (goes_TR & ~fits_TR).any(), back_TJ)


class DensePlaces(NamedTuple):
    """The rows that leave in blocks as long as they have to be, one after the other."""

    rows_P: Tensor
    """int64: the row in each place, T for a header or nothing."""
    lengths_R: Tensor
    """int64: places of each block, its header in it."""
    begin_R: Tensor
    """int64: the place of each block's header."""
    back_TJ: Tensor
    """The places of each row in ascending order, then -1. J = min(K, R)."""


def dense_places(slots_TK: Tensor, *, slots_per_member: int, num_members: int, num_places: int) -> DensePlaces:
    """`row_places` without padding between blocks; what is left of `num_places` is at the end, and nobody gets it.

    2 members of 2 slots, slots [[0, 1], [0, 3], [-1, 2]]     rows [3, 0, 1, 3, 1, 2, 3], lengths [3, 3], begin [0, 3],
    7 places                                                  back [[1, -1], [2, 4], [5, -1]]
    """
    num_rows, device = slots_TK.shape[0], slots_TK.device
    goes_TR = torch.zeros(num_rows, num_members + 1, dtype=torch.bool, device=device)
    goes_TR.scatter_(1, ranks_of(slots_TK, slots_per_member) + 1, True)  # column 0 takes the -1s
    goes_TR = goes_TR[:, 1:]
    lengths_R = goes_TR.sum(0) + 1
    begin_R = lengths_R.cumsum(0) - lengths_R
    target_TR = begin_R + goes_TR.cumsum(0)
    rows_P = torch.full((num_places + 1,), num_rows, device=device)
    row_TR = torch.arange(num_rows, device=device).unsqueeze(1).expand(num_rows, num_members)
    rows_P.scatter_(0, target_TR.where(goes_TR, num_places).flatten(), row_TR.flatten())
    back_TJ = by_row(target_TR, goes_TR, most=min(slots_TK.shape[1], num_members))
    rows_P = rows_P[:num_places]
    return DensePlaces(rows_P, lengths_R, begin_R, back_TJ)


def given_back(index_NK: Tensor, *, num_members: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Pairs of what landed in blocks of equal length, to be given back: ([P] the pair row in each place, 0 for a header
    or nothing; bool scalar, some pair has no place). In each block in (row, top-k) order."""
    valid_RM = (index_NK >= 0).view(num_members, -1)
    place_RM = valid_RM.cumsum(1) - 1
    fits_RM = valid_RM & (place_RM < capacity)
    num_places = num_members * (1 + capacity)
    target_RM = _in_blocks(place_RM.t(), capacity).t().where(fits_RM, num_places)
    index_P = torch.zeros(num_places + 1, dtype=torch.int64, device=index_NK.device)
    index_P.scatter_(0, target_RM.flatten(), index_NK.flatten())
    return index_P[:num_places], (valid_RM & ~fits_RM).any()


def come_back(slots_TK: Tensor, fits_TR: Tensor, *, slots_per_member: int, capacity: int) -> Tensor:
    """int64 [T, K]: the place in which each pair's row comes back; -1 for none. The other side of given_back."""
    member_TK = ranks_of(slots_TK, slots_per_member)
    number_TK = member_TK.clamp(min=0)
    sent_TK = (member_TK >= 0) & fits_TR.gather(1, number_TK)
    counted = torch.zeros(slots_TK.numel(), fits_TR.shape[1], dtype=torch.int64, device=slots_TK.device)
    counted.scatter_(1, number_TK.view(-1, 1), sent_TK.view(-1, 1).to(torch.int64))
    place_TK = (counted.cumsum(0) - 1).gather(1, number_TK.view(-1, 1)).view(slots_TK.shape)
    target_TK = number_TK * (1 + capacity) + 1 + place_TK
    return target_TK.where(sent_TK & (place_TK < capacity), -1)


def _in_blocks(place_TR: Tensor, capacity: int) -> Tensor:
    """Places in a member's block (last dimension) as places of all blocks."""
    return place_TR + 1 + (1 + capacity) * torch.arange(place_TR.shape[1], device=place_TR.device)
