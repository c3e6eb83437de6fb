"""How often each expert was asked for: counts of real tokens, added up over a window of steps.

Knows logical experts; a placement comes in as a plain list of which expert sits in which slot. It plans nothing.

Legend: E experts, R ranks; Y the MoE layers of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWindow:
    """What was counted from one `take_window` to the next."""

    counts_YE: Tensor
    """int64 [Y, E] pairs a layer sent to each expert."""
    num_tokens: int
    """Tokens behind them (the same in each layer)."""
    num_steps: int


class ExpertLoad:
    """Adds up the counts of steps; the counts stay on their device until a window is taken."""

    def __init__(self, num_layers: int, num_experts: int, *, device: torch.device | str = "cpu") -> None:
        self._counts_YE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._num_tokens = 0
        self._num_steps = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def counts_YE(self) -> Tensor:
        """int64 [Y, E] totals of the window so far (a copy)."""
        return self._counts_YE.clone()

    def add(self, counts_YE: Tensor, *, num_tokens: int) -> None:
        """One step: the pairs each layer sent to each expert, and how many tokens (not padded rows) sent them."""
        assert counts_YE.shape == self._counts_YE.shape, f"{tuple(counts_YE.shape)} for {tuple(self._counts_YE.shape)}"
        self._counts_YE += counts_YE
        self._num_tokens += num_tokens
        self._num_steps += 1

    def check_conserved(self, top_k: int) -> None:
        """Asserts that each layer sent every token to exactly top_k experts; names the first layer that did not."""
        expected = self._num_tokens * top_k
        for layer, total in enumerate(self._counts_YE.sum(dim=1).tolist()):
            assert total == expected, (
                f"MoE layer {layer} counted {total} pairs, {self._num_tokens} tokens x top_k {top_k} = {expected}"
            )

    def take_window(self) -> LoadWindow:
        """The window so far; counting starts anew at zero."""
        window = LoadWindow(counts_YE=self.counts_YE, num_tokens=self._num_tokens, num_steps=self._num_steps)
        self._counts_YE.zero_()
        self._num_tokens = self._num_steps = 0
        return window


def rank_loads(counts_E: Sequence[float], slot_experts: Sequence[int], num_ranks: int) -> list[float]:
    """Pairs that land on each rank when an expert's copies share its count evenly; -1 is an empty slot.

    counts [6, 2], slots (0, 1 | 0, -1) on 2 ranks -> [3 + 2, 3]
    """
    slots_per_rank, rest = divmod(len(slot_experts), num_ranks)
    assert rest == 0, f"{len(slot_experts)} slots on {num_ranks} ranks"
    copies = [0] * len(counts_E)
    for expert in slot_experts:
        if expert >= 0:
            copies[expert] += 1
    shares = [counts_E[expert] / copies[expert] if expert >= 0 else 0.0 for expert in slot_experts]
    return [sum(shares[rank * slots_per_rank : (rank + 1) * slots_per_rank]) for rank in range(num_ranks)]


def balancedness(counts_E: Sequence[float], slot_experts: Sequence[int], num_ranks: int) -> float:
    """Mean over maximum of the ranks' loads, in (0, 1]: how busy the average rank is; 1 without load."""
    loads = rank_loads(counts_E, slot_experts, num_ranks)
    heaviest = max(loads)
    return sum(loads) / len(loads) / heaviest if heaviest > 0 else 1.0
