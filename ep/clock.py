"""The step that a device stands at, for exchanges that are recorded once and replayed in many steps.

    recorded    tag.step is ON_DEVICE: a header takes its step from a tensor, and so does who compares it
    replayed    the clock is set before, outside of what was recorded

A tag's other words do not change from replay to replay; they come to the device when they are first asked for, so what
is to be recorded has run once before. Knows tags; does not know who records.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .transport import Tag

__all__ = ["ON_DEVICE", "TAG_WORDS", "StepClock"]

ON_DEVICE = -1
"""The step of a tag whose step the clock says."""
TAG_WORDS = len(Tag._fields)


class StepClock:
    """One rank's. Steps are launched one after the other, so that one tensor serves all that is under way."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._known = 0
        self._rest: dict[tuple[int, ...], Tensor] = {}

    def set(self, step: int) -> None:
        """What is launched from now on belongs to this step. The host waits for nothing."""
        if step != self._known:
            self._step_1.fill_(step)
            self._known = step

    def words(self, tag: Tag) -> Tensor:
        """int64 [TAG_WORDS] on the device."""
        if tag.step != ON_DEVICE:
            self.set(tag.step)
        rest = tag[1:]
        if rest not in self._rest:
            self._rest[rest] = torch.tensor(rest, dtype=torch.int64, device=self._device)
        return torch.cat((self._step_1, self._rest[rest]))
