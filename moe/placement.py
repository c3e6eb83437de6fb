"""Where experts sit: the frozen map between logical experts and physical slots, and the choice among copies.

Slot s lives on rank s // slots_per_rank. Knows nothing of weights, loads or how a placement was planned.

Legend: T tokens here, E experts, K top-k, X copies of one expert, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


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

    def table(self, device: torch.device | str = "cpu") -> "PlacementTable":
        """The same map turned around, as tensors."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slot_experts):
            if expert != -1:
                slots[expert].append(slot)
        return PlacementTable.build(slots, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementTable:
    """The slots of every expert. The row past the last expert stands for "no expert", so that id -1 finds it."""

    slots_EX: Tensor
    """int64 [E + 1, X] slots in ascending order, padded with -1; the last row is all -1."""
    copies_E: Tensor
    """int64 [E + 1] how many of them are real, at least 1; 1 in the last row."""

    @classmethod
    def build(cls, slots: Sequence[Sequence[int]], *, device: torch.device | str) -> "PlacementTable":
        """From the list of slots of each expert."""
        most = max(len(row) for row in slots)
        padded = [[*row, *[-1] * (most - len(row))] for row in slots]
        return cls(
            slots_EX=torch.tensor([*padded, [-1] * most], dtype=torch.int64, device=device),
            copies_E=torch.tensor([*map(len, slots), 1], dtype=torch.int64, device=device),
        )

    @property
    def num_experts(self) -> int:
        return self.slots_EX.shape[0] - 1

    @property
    def max_copies(self) -> int:
        return self.slots_EX.shape[1]


def spread(num_experts: int, num_ranks: int) -> ExpertPlacement:
    """One copy of each expert, contiguous and even: ranks hold counts that differ by at most one.

    5 experts on 3 ranks: (0, 1 | 2, 3 | 4, -1). Raises ValueError when a rank would hold none.
    """
    if not 1 <= num_ranks <= num_experts:
        raise ValueError(
            f"num_ranks {num_ranks} must be from 1 to {num_experts}: each rank holds at least one of the "
            f"{num_experts} routed experts, so {min(max(num_ranks, 1), num_experts)} would do"
        )
    fewest, more = divmod(num_experts, num_ranks)
    slots_per_rank = fewest + (more > 0)
    slot_experts: list[int] = []
    first = 0
    for rank in range(num_ranks):
        held = fewest + (rank < more)
        slot_experts += [*range(first, first + held), *[-1] * (slots_per_rank - held)]
        first += held
    return ExpertPlacement(num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_experts=tuple(slot_experts))


def choose_slots(experts_TK: Tensor, table: PlacementTable, *, rank: int, positions_T: Tensor) -> Tensor:
    """int64 slots [T, K]: one copy of each chosen expert; expert -1 gives slot -1.

    Copies are picked by a hash of (rank, row, position), so the copies of an expert share its tokens evenly, two ranks
    do not lean on the same copy, and a row that stays in its place changes copies from step to step. The position alone
    would not do: requests that started together all sit at the same one. The same input gives the same answer.
    """
    if table.max_copies == 1:
        return table.slots_EX[:, 0][experts_TK]
    copy_TK = _mix(rank, positions_T).unsqueeze(1) % table.copies_E[experts_TK]
    return table.slots_EX[experts_TK, copy_TK]


def _mix(rank: int, positions_T: Tensor) -> Tensor:
    """int64 [T] in [0, 2**32): well mixed words of (rank, row, position)."""
    rows_T = torch.arange(positions_T.shape[0], device=positions_T.device)
    return _scramble(_scramble(rows_T + (rank << 20)) ^ (positions_T & _WORD))


def _scramble(word: Tensor) -> Tensor:
    """A bijection of 32-bit words kept in int64; both factors are below 2**31, so no product overflows.

    Constants: "Hash Function Prospector", https://github.com/skeeto/hash-prospector.
    """
    word = word & _WORD
    word = (word ^ (word >> 16)) * 0x21F0AAAD & _WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & _WORD
    return word ^ (word >> 15)
