"""Where experts sit: the frozen map between logical experts and physical slots, and the choice among copies.

Slot s lives on rank s // slots_per_rank. Knows nothing of weights, loads or how a placement was planned; how a rank's
tokens are shared out among copies is `replicas`'.

Legend: T tokens here, E experts, K top-k, X copies of one expert, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from .replicas import copy_shares

_WORD = 0xFFFFFFFF
# 2**32 over the golden ratio: multiples of it, modulo 2**32, fill the range more evenly than random words do.
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """Which expert each slot holds. Raises ValueError if a slot or an expert is left out.

    2 ranks x 2 slots, 3 experts: slot_experts (0, 1, 2, -1); rank 0 holds 0 and 1, rank 1 holds 2 and a free slot.
    """

    num_ranks: int
    slots_per_rank: int
    slot_experts: tuple[int, ...]
    """Expert in each slot, rank-major; -1 is an empty slot. An expert may sit in several slots."""
    epoch: int = 0
    """Grows by one with every change; ranks agree on it before a step."""

    def __post_init__(self) -> None:
        num_slots = self.num_ranks * self.slots_per_rank
        if len(self.slot_experts) != num_slots:
            raise ValueError(
                f"slot_experts has {len(self.slot_experts)} entries, it must have num_ranks {self.num_ranks} x "
                f"slots_per_rank {self.slots_per_rank} = {num_slots}"
            )
        held = {expert for expert in self.slot_experts if expert != -1}
        if not held or min(held) < 0:
            wrong = min(held) if held else -1
            raise ValueError(f"slot_experts holds {wrong}: must hold experts from 0 on, -1 for an empty slot")
        if len(held) <= max(held):
            missing = islice((expert for expert in count() if expert not in held), min(max(held) + 1 - len(held), 8))
            raise ValueError(f"slot_experts leaves out experts {list(missing)}: every expert needs at least one slot")

    @property
    def num_slots(self) -> int:
        return len(self.slot_experts)

    @property
    def num_experts(self) -> int:
        return max(self.slot_experts) + 1

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Expert in each of one rank's slots, in slot order, `slots_per_rank` long; -1 is an empty slot."""
        first = rank * self.slots_per_rank
        return self.slot_experts[first : first + self.slots_per_rank]

    def table(
        self,
        device: torch.device | str = "cpu",
        *,
        rank: int | None = None,
        node_size: int = 1,
        width: int | None = None,
    ) -> "PlacementTable":
        """The same map turned around, as tensors.

        rank        whose tokens will be looked up: it prefers copies of its own and of its node (`node_size` ranks), as
                    `replicas` says; None: all copies alike
        width       X of the tables at least, so that another placement's table can be written over this one
        """
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slot_experts):
            if expert != -1:
                slots[expert].append(slot)
        table = PlacementTable.build(slots, device="cpu", width=width)
        most = max(len(row) for row in slots)
        if rank is not None and most > 1:
            shares_EX = copy_shares(
                table.slots_EX[:-1, :most].numpy(),
                rank=rank,
                num_ranks=self.num_ranks,
                slots_per_rank=self.slots_per_rank,
                node_size=node_size,
            )
            table.bounds_EX[:-1, :most] = torch.from_numpy(_bounds(shares_EX))
        return table.to(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementTable:
    """The slots of every expert. The row past the last expert stands for "no expert", so that id -1 finds it."""

    slots_EX: Tensor
    """int64 [E + 1, X] slots in ascending order, padded with -1; the last row is all -1."""
    copies_E: Tensor
    """int64 [E + 1] how many of them are real, at least 1; 1 in the last row."""
    bounds_EX: Tensor
    """int64 [E + 1, X] a token whose word lies in [bounds[x - 1], bounds[x]) takes copy x; the last is 2**32."""

    @classmethod
    def build(
        cls, slots: Sequence[Sequence[int]], *, device: torch.device | str, width: int | None = None
    ) -> "PlacementTable":
        """From the list of slots of each expert, all copies alike; at least `width` columns."""
        most = max(width or 1, *[len(row) for row in slots])
        padded = [[*row, *[-1] * (most - len(row))] for row in slots]
        copies_E = np.array([*map(len, slots), 1])
        even_EX = (np.arange(most) < copies_E[:, None]) / copies_E[:, None]
        return cls(
            slots_EX=torch.tensor([*padded, [-1] * most], dtype=torch.int64, device=device),
            copies_E=torch.tensor(copies_E, dtype=torch.int64, device=device),
            bounds_EX=torch.tensor(_bounds(even_EX), dtype=torch.int64, device=device),
        )

    @property
    def num_experts(self) -> int:
        return self.slots_EX.shape[0] - 1

    @property
    def max_copies(self) -> int:
        """Columns: at least as many as any expert has copies."""
        return self.slots_EX.shape[1]

    def to(self, device: torch.device | str) -> "PlacementTable":
        """The same table on another device."""
        return PlacementTable(
            slots_EX=self.slots_EX.to(device), copies_E=self.copies_E.to(device), bounds_EX=self.bounds_EX.to(device)
        )

    def write(self, other: "PlacementTable") -> None:
        """Become `other`, in place: whoever holds these tensors (a captured graph) sees the new map."""
        mine, its = (self.slots_EX, self.copies_E, self.bounds_EX), (other.slots_EX, other.copies_E, other.bounds_EX)
        for old, new in zip(mine, its, strict=True):
            assert old.shape == new.shape, f"{tuple(new.shape)} over {tuple(old.shape)}"
            old.copy_(new)


def most_copies(num_ranks: int, num_redundant: int) -> int:
    """Copies of one expert that `num_redundant` slots can bring about when no rank holds two: the width of tables."""
    return min(num_redundant + 1, num_ranks)


def spread(num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
    """Experts in order, then the first `num_redundant` of them once more; ranks hold counts that differ by at most one.

    5 experts on 3 ranks: (0, 1 | 2, 3 | 4, -1); with 2 more: (0, 1, 2 | 3, 4, -1 | 0, 1, -1). Raises ValueError when a
    rank would hold none, or an expert twice.
    """
    if not 1 <= num_ranks <= num_experts:
        raise ValueError(
            f"num_ranks {num_ranks} must be from 1 to {num_experts}: each rank holds at least one of the "
            f"{num_experts} routed experts, so {min(max(num_ranks, 1), num_experts)} would do"
        )
    most = num_experts * (num_ranks - 1)
    if not 0 <= num_redundant <= most:
        raise ValueError(
            f"num_redundant_experts {num_redundant} must be from 0 to {most}: on {num_ranks} ranks no expert has use "
            f"for more copies than that, so {min(max(num_redundant, 0), most)} would do"
        )
    fewest, more = divmod(num_experts + num_redundant, num_ranks)
    slots_per_rank = fewest + (more > 0)
    slot_experts: list[int] = []
    first = 0
    for rank in range(num_ranks):
        held = fewest + (rank < more)
        # Consecutive numbers modulo E, at most E of them: no rank holds an expert twice.
        slot_experts += [copy % num_experts for copy in range(first, first + held)]
        slot_experts += [-1] * (slots_per_rank - held)
        first += held
    return ExpertPlacement(num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_experts=tuple(slot_experts))


def choose_slots(experts_TK: Tensor, table: PlacementTable, *, rank: int, positions_T: Tensor) -> Tensor:
    """int64 slots [T, K]: one copy of each chosen expert; expert -1 gives slot -1.

    Copies are picked by a word made of (rank, row, expert), which is random, and the position, which moves it on by the
    golden ratio. So the copies of an expert get the shares that the table gives them, two ranks do not lean on the same
    copy, a row that stays in its place goes round the copies evenly, and a token's choices do not go together. The
    position alone would not do: requests that started together all sit at the same one. The same input gives the same
    answer.
    """
    if table.max_copies == 1:
        return table.slots_EX[:, 0][experts_TK]
    word_TK = _words(experts_TK, rank=rank, positions_T=positions_T)
    copy_TK = (word_TK.unsqueeze(2) >= table.bounds_EX[experts_TK]).sum(dim=2)
    return table.slots_EX[experts_TK, copy_TK]


def _bounds(shares_EX: np.ndarray) -> np.ndarray:
    """int64 [E, X]: shares summed up, as words of 32 bits; from the last share on 2**32, which no word reaches."""
    sums_EX = shares_EX.cumsum(axis=1)
    reached_EX = np.flip(np.flip(shares_EX, axis=1).cumsum(axis=1), axis=1) - shares_EX <= 0
    return np.where(reached_EX, 1 << 32, np.rint(sums_EX * (1 << 32)).astype(np.int64))


def _words(experts_TK: Tensor, *, rank: int, positions_T: Tensor) -> Tensor:
    """int64 [T, K] in [0, 2**32)."""
    rows_T = torch.arange(positions_T.shape[0], device=positions_T.device)
    mixed_TK = _scramble(_scramble(rows_T + (rank << 20)).unsqueeze(1) ^ (experts_TK & _WORD))
    return (mixed_TK + (positions_T * _GOLDEN).unsqueeze(1)) & _WORD


def _scramble(word: Tensor) -> Tensor:
    """A bijection of 32-bit words kept in int64; both factors are below 2**31, so no product overflows.

    Constants: "Hash Function Prospector", https://github.com/skeeto/hash-prospector.
    """
    word = word & _WORD
    word = (word ^ (word >> 16)) * 0x21F0AAAD & _WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & _WORD
    return word ^ (word >> 15)
