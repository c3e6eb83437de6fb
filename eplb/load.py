"""How often each expert was asked for: counts of real tokens, added up over a sliding window of steps.

The window is a ring of parts, each the sum of some steps: a step is one addition in place, and the oldest part is
dropped when the newest is full. Counts stay on their device until somebody asks; ranks are added up by whoever has a
transport.

Knows logical experts; a placement comes in as a plain list of which expert sits in which slot. It plans nothing.

Legend: E experts, R ranks, W parts of the window, newest first; Y the MoE layers of a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_UNIT = 256
"""What the newest part's counts are multiplied by in a weighted view: weights are whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWindow:
    """What was counted in some steps."""

    counts_YE: Tensor
    """int64 [Y, E] pairs a layer sent to each expert."""
    num_tokens: int
    """Tokens behind them (the same in each layer)."""
    num_steps: int

    def check_conserved(self, top_k: int) -> None:
        """Asserts that each layer sent every token to exactly top_k experts; names the first layer that did not."""
        expected = self.num_tokens * top_k
        for layer, total in enumerate(self.counts_YE.sum(dim=1).tolist()):
            assert total == expected, (
                f"MoE layer {layer} counted {total} pairs, {self.num_tokens} tokens x top_k {top_k} = {expected}"
            )

    def to_words(self) -> Tensor:
        """int64 [2 + Y E] on the counts' device, for a transport: tokens, steps, counts."""
        head = torch.tensor([self.num_tokens, self.num_steps], dtype=torch.int64, device=self.counts_YE.device)
        return torch.cat([head, self.counts_YE.flatten()])

    @classmethod
    def from_words(cls, words: Tensor, *, num_layers: int, num_experts: int) -> LoadWindow:
        """What `to_words` was called on."""
        assert words.shape == (2 + num_layers * num_experts,), f"{tuple(words.shape)}"
        num_tokens, num_steps = words[:2].tolist()
        counts_YE = words[2:].reshape(num_layers, num_experts)
        return cls(counts_YE=counts_YE, num_tokens=num_tokens, num_steps=num_steps)

    @classmethod
    def total(cls, windows: Iterable[LoadWindow]) -> LoadWindow:
        """The ranks of a group together: their steps are the same steps."""
        first, *others = windows
        counts_YE, num_tokens = first.counts_YE.clone(), first.num_tokens
        for window in others:
            assert window.num_steps == first.num_steps, f"{window.num_steps} steps beside {first.num_steps}"
            counts_YE += window.counts_YE
            num_tokens += window.num_tokens
        return cls(counts_YE=counts_YE, num_tokens=num_tokens, num_steps=first.num_steps)


class ExpertLoad:
    """Adds up the counts of steps; the counts stay on their device until a window is taken.

    window  steps that count once so many were taken; less than two parts more are kept
    parts   that it is made of; more follow a drifting load more closely and take more memory
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        device: torch.device | str = "cpu",
        window: int = 1000,
        parts: int = 8,
    ) -> None:
        assert window >= 1, f"window of {window} steps"
        assert parts >= 1, f"{parts} parts"
        self._steps_per_part = -(-window // parts)
        num_parts = -(-window // self._steps_per_part) + 1
        self._ring_WYE = torch.zeros(num_parts, num_layers, num_experts, dtype=torch.int64, device=device)
        self._newest = 0
        self._part_YE = self._ring_WYE[0]
        self._tokens: deque[int] = deque([0], maxlen=num_parts)
        self._steps: deque[int] = deque([0], maxlen=num_parts)

    @property
    def num_tokens(self) -> int:
        """Tokens in the window."""
        return sum(self._tokens)

    @property
    def num_steps(self) -> int:
        """Steps in the window."""
        return sum(self._steps)

    @property
    def counts_YE(self) -> Tensor:
        """int64 [Y, E] totals of the window so far (a copy)."""
        return self._ring_WYE.sum(dim=0)

    def add(self, counts_YE: Tensor, *, num_tokens: int) -> None:
        """One step: the pairs each layer sent to each expert, and how many tokens (not padded rows) sent them."""
        assert counts_YE.shape == self._part_YE.shape, f"{tuple(counts_YE.shape)} for {tuple(self._part_YE.shape)}"
        if self._steps[0] == self._steps_per_part:
            self._begin_part()
        self._part_YE += counts_YE
        self._tokens[0] += num_tokens
        self._steps[0] += 1

    def _begin_part(self) -> None:
        self._newest = (self._newest + 1) % len(self._ring_WYE)
        self._part_YE = self._ring_WYE[self._newest]
        self._part_YE.zero_()
        self._tokens.appendleft(0)
        self._steps.appendleft(0)

    def check_conserved(self, top_k: int) -> None:
        """Asserts that each layer sent every token to exactly top_k experts; names the first layer that did not."""
        self.window().check_conserved(top_k)

    def window(self) -> LoadWindow:
        """The window as it is (a copy)."""
        return LoadWindow(counts_YE=self.counts_YE, num_tokens=self.num_tokens, num_steps=self.num_steps)

    def weighted(self, decay: float = 0.75) -> LoadWindow:
        """The window with each part worth `decay` times the next newer one.

        Weights are whole numbers of WEIGHT_UNIT for the newest part, so that the sums of ranks are exact, and they hold
        for counts and tokens alike.
        """
        assert 0.0 < decay <= 1.0, f"decay {decay}"
        weights = [round(WEIGHT_UNIT * decay**age) for age in range(len(self._tokens))]
        places = [(self._newest - age) % len(self._ring_WYE) for age in range(len(weights))]
        counts_YE = torch.zeros_like(self._part_YE)
        for place, weight in zip(places, weights, strict=True):
            counts_YE += self._ring_WYE[place] * weight
        num_tokens = sum(weight * tokens for weight, tokens in zip(weights, self._tokens, strict=True))
        return LoadWindow(counts_YE=counts_YE, num_tokens=num_tokens, num_steps=self.num_steps)


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
