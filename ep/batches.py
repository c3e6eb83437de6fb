"""Tokens of a whole group for tests of the exchange: every rank makes the same ones from the seed, sends its own and
predicts the rest.

Legend: G tokens of all ranks in rank order, D model, K top-k, N rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import wide


def count_off(counts: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(rank, number) of each row: counts [2, 0, 1] -> [0, 0, 2], [0, 1, 0]."""
    counts_R = torch.tensor(counts, device=device)
    rank = torch.arange(len(counts), device=device).repeat_interleave(counts_R)
    return rank, torch.arange(rank.shape[0], device=device) - (counts_R.cumsum(0) - counts_R)[rank]


def expert(x_ND: Tensor, slots_N: Tensor) -> Tensor:
    """A stand-in for an expert: depends on the slot, row by row, in x's dtype."""
    scale_N = (slots_N % 13).to(x_ND.dtype)[:, None] / 8 + 0.5
    return x_ND * scale_N + (slots_N % 5).to(x_ND.dtype)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class GlobalBatch:
    """The tokens of all ranks. Every rank makes it from the seed, sends its own part and predicts the rest."""

    num_tokens_R: tuple[int, ...]
    x_GD: Tensor
    slots_GK: Tensor
    weights_GK: Tensor

    def own(self, rank: int) -> slice:
        begin = sum(self.num_tokens_R[:rank])
        return slice(begin, begin + self.num_tokens_R[rank])

    @property
    def source_G(self) -> Tensor:
        return count_off(self.num_tokens_R, "cpu")[0]

    @property
    def place_G(self) -> Tensor:
        """Each token's place among those of its rank."""
        return count_off(self.num_tokens_R, "cpu")[1]


ROUTINGS = ("spread", "one slot", "one rank", "one node", "few nodes", "masked", "idle", "silent")
"""What check_exchange routes. few nodes: each token to at most half of the nodes, as group-limited routing does. idle:
ranks of odd number have no tokens; silent: none has any."""


def make_batch(
    routing: str,
    *,
    num_ranks: int,
    num_slots: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype,
    seed: int = 0,
    node_size: int = 1,
) -> GlobalBatch:
    """A batch of one of the ROUTINGS, the same for every caller."""
    generator = torch.Generator().manual_seed(1000 * seed + ROUTINGS.index(routing))
    num_tokens = [(5 * rank + 4) % 12 for rank in range(num_ranks)]
    if routing == "idle":
        num_tokens = [0 if rank % 2 else count for rank, count in enumerate(num_tokens)]
    if routing == "silent":
        num_tokens = [0] * num_ranks
    slots = _make_slots(
        routing, sum(num_tokens), top_k, generator, num_slots=num_slots, num_ranks=num_ranks, node_size=node_size
    )
    x = torch.randn(sum(num_tokens), hidden, dtype=torch.float64, generator=generator)
    weights = torch.rand(sum(num_tokens), top_k, dtype=torch.float64, generator=generator)
    return GlobalBatch(tuple(num_tokens), x.to(dtype), slots, weights.to(wide(dtype)))


def _make_slots(
    routing: str,
    num_tokens: int,
    top_k: int,
    generator: torch.Generator,
    *,
    num_slots: int,
    num_ranks: int,
    node_size: int,
) -> Tensor:
    """int64 [num_tokens, top_k]; no slot twice in a row where there are enough of them."""
    per_rank = num_slots // num_ranks
    per_node, num_nodes = per_rank * node_size, num_ranks // node_size
    shape = (num_tokens, top_k)
    if routing == "one slot":
        return torch.full(shape, num_slots - 1)
    if routing == "one rank":
        return torch.randint(0, per_rank, shape, generator=generator)
    if routing == "one node":
        return num_slots - 1 - torch.randint(0, per_node, shape, generator=generator)
    if routing == "few nodes":
        nodes = torch.rand(num_tokens, num_nodes, generator=generator).argsort(1)[:, : -(-num_nodes // 2)]
        chosen = nodes.gather(1, torch.randint(0, nodes.shape[1], shape, generator=generator))
        return per_node * chosen + torch.randint(0, per_node, shape, generator=generator)
    if top_k > num_slots:
        slots = torch.randint(0, num_slots, shape, generator=generator)
    else:
        slots = torch.rand(num_tokens, num_slots, generator=generator).argsort(1)[:, :top_k]
    return slots.where(torch.rand(shape, generator=generator) < 0.5, -1) if routing == "masked" else slots
