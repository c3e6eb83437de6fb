"""Ranks at another place of the program, found on the device and told when the host looks."""

from __future__ import annotations

import torch
from torch import Tensor

from .clock import TAG_WORDS
from .subgroup import Subgroup
from .tags import check_tags


class Faults:
    """The first exchange of a hop whose headers do not fit together, on the device until somebody asks."""

    def __init__(self, group: Subgroup, device: torch.device | str) -> None:
        self._members = group.members
        self._rank = group.members[group.rank]
        self._found = torch.zeros((), dtype=torch.bool, device=device)
        self._heard = torch.zeros(group.size, TAG_WORDS, dtype=torch.int64, device=device)

    def compare(self, heard: Tensor, tag: Tensor) -> None:
        """`heard` [members, TAG_WORDS] should all be `tag`."""
        is_first = (heard != tag).any() & ~self._found
        self._heard.copy_(heard.where(is_first, self._heard))
        self._found.logical_or_(is_first)

    @property
    def found(self) -> Tensor:
        """Bool scalar on the device: there was one. It stays up, and later ones are looked past."""
        return self._found

    def check(self) -> None:
        """Raise TagMismatch for the first fault. The host waits for the device."""
        if self._found.item():
            words: list[tuple[int, ...]] = [tuple(tag) for tag in self._heard.tolist()]
            check_tags(words, rank=self._rank, ranks=self._members)
