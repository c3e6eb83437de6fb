"""Steps of a rank's slice: requests that already decode, launched as the engine launches them, over a filled cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_mla import LatentCache
from dbo.policy import Choice

from ..loop.launcher import Launched, Launcher
from ..requests.request import Request
from ..requests.rows import Row, Rows
from ..scheduling.cadence import Reason
from ..scheduling.heartbeat import StepPlan

FILLED_AT_ONCE = 1 << 16
"""Positions of the cache; their float32 latents are a few hundred MB."""


class Steps:
    """Steps in which the same requests decode, each launched before the one before it is read."""

    def __init__(self, requests: Sequence[Request], launcher: Launcher, *, level: int, first: int) -> None:
        self._requests = requests
        self.launcher = launcher
        self.level = level
        self._position = first
        self._number = 0
        self._unread: Launched | None = None

    def run(self) -> None:
        """One more; then the one before it is read."""
        launched = self.launch()
        if self._unread is not None:
            self._unread.tokens()
        self._unread = launched

    def launch(self) -> Launched:
        """One more."""
        rows = Rows.of([Row(request, self._position, 1, 0, True) for request in self._requests])
        launched = self.launcher.launch(rows, _plan(self._number, len(rows), self.level))
        self._position += 1
        self._number += 1
        return launched


def fill(cache: LatentCache, *, seed: int) -> None:
    """Latents of unit size in every page: what a device computes of zeros costs it less power than what it meets."""
    device, row = cache.pages.device, cache.row
    dice = torch.Generator(device).manual_seed(seed)
    places = torch.arange(cache.num_pages * cache.page_size, device=device)
    for layer in range(cache.pages.shape[0]):
        for places_T in places.split(FILLED_AT_ONCE):
            latents_TW = torch.randn(len(places_T), row.rank + row.rope_dim, generator=dice, device=device)
            cache.append(layer, latents_TW.to(row.dtype), places_T)


def _plan(step: int, bucket: int, level: int) -> StepPlan:
    """Every rank decodes as many tokens."""
    return StepPlan(
        step=step,
        wave=0,
        bucket=bucket,
        epoch=0,
        prefill_allowed=None,
        reason=Reason.NO_PROMPTS,
        last=False,
        stalled=False,
        pause=False,
        paused=False,
        drain=False,
        drained=False,
        failed=None,
        clean=step - 1,
        rerun_from=None,
        capacity_level=level,
        tracks=1,
        track_tokens=bucket,
        overlap=Choice.OFF,
    )
