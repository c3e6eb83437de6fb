"""Banks whose experts can be told apart, and placements at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from moe import ExpertBank, ExpertPlacement, MoeConfig, PlacementTable
from moe.reference import quantize_bank, random_weights, take_slots

torch.set_num_threads(1)


def moe_config(num_experts: int, *, hidden: int = 40, width: int = 24, top_k: int = 2) -> MoeConfig:
    return MoeConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_experts=num_experts,
        top_k=top_k,
        scoring="sigmoid",
        method="noaux_tc",
    )


def whole_bank(num_experts: int, *, seed: int, dtype: torch.dtype, fp8: bool = False) -> ExpertBank:
    """Expert e in slot e."""
    bank = random_weights(moe_config(num_experts), seed=seed, dtype=dtype).bank
    return quantize_bank(bank) if fp8 else bank


def place(whole: ExpertBank, placement: ExpertPlacement, rank: int) -> ExpertBank:
    """A rank's bank: copies of its experts, NaN in empty slots."""
    return take_slots(whole, placement.experts_of(rank))


def blobs(bank: ExpertBank) -> list[Tensor]:
    return [bank.blob(slot) for slot in range(bank.num_slots)]


def random_placement(
    num_ranks: int, slots_per_rank: int, num_experts: int, rng: random.Random, *, twice: bool = False
) -> ExpertPlacement:
    """Every expert at least once, copies at random, on a rank once only (unless `twice`), some slots empty."""
    while True:
        rest = [rng.randrange(-1, num_experts) for _ in range(num_ranks * slots_per_rank - num_experts)]
        slots = [*range(num_experts), *rest]
        rng.shuffle(slots)
        placement = ExpertPlacement(num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_experts=tuple(slots))
        if twice:
            return placement
        kept: list[int] = []
        for rank in range(num_ranks):
            seen: set[int] = set()
            for expert in placement.experts_of(rank):
                kept.append(-1 if expert in seen else expert)
                seen.add(expert)
        return ExpertPlacement(num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_experts=tuple(kept))


def table_of(placement: ExpertPlacement, rank: int) -> PlacementTable:
    """Wide enough for any placement of as many slots."""
    return placement.table(rank=rank, width=placement.num_slots)


def slots_of(table: PlacementTable) -> Sequence[Sequence[int]]:
    return table.slots_EX.tolist()
