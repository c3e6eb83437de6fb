"""What a benchmark asks of an engine beside decoding; nothing of it unless somebody does.

Chosen once, at start, the same on every rank: the step loop has no branch for any of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attention_mla import LatentCache
from ep import Exchange, Transport

from ..failure.recorder import Recorder
from ..forward.part_times import NO_PARTS, NoParts, PartTimer, TimedExchange, TimedRecorder, TimedSampler
from ..requests.kv_log import KvLog
from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from ..requests.request import Request
from ..sampling.sampler_ops import SamplerOps

FILL_SEED, FILL_ROWS = 0x51, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """How a benchmark wants its ranks built.

    parts    measure where each step's time goes
    filled   caches are full of random latents, and prompts count as computed but for their last token: all decodes
    """

    parts: bool = False
    filled: bool = False

    def timer(self) -> NoParts:
        """One rank's."""
        return PartTimer() if self.parts else NO_PARTS

    def prefix(self, pool: PagePool, *, enabled: bool, log: KvLog | None = None) -> PrefixCache:
        """The prefix cache of a rank; `log` is told what it holds."""
        return FilledPrefix(pool) if self.filled else PrefixCache(pool, enabled=enabled, log=log)

    def prepare(self, cache: LatentCache) -> None:
        """Fill a rank's cache, where that is asked for."""
        if self.filled:
            fill(cache)


class FilledPrefix(PrefixCache):
    """Finds no page, and takes every token of a request but the newest for computed: its pages are filled already."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool, enabled=False)

    def num_computed(self, request: Request, pages: list[int]) -> int:  # noqa: ARG002  # the parent's
        """All but the newest token, whose latent this step appends."""
        return len(request.tokens) - 1


def fill(cache: LatentCache) -> None:
    """Random latents of about unit size, as norms leave them: zeros would draw less power and hit other paths."""
    device, row = cache.pages.device, cache.row
    generator = torch.Generator(device=device).manual_seed(FILL_SEED)
    for layer in range(cache.pages.shape[0]):
        for places_T in torch.arange(cache.num_pages * cache.page_size, device=device).split(FILL_ROWS):
            shape = len(places_T), row.rank + row.rope_dim
            cache.append(layer, torch.randn(shape, generator=generator, device=device).to(row.dtype), places_T)


def timed_recorder(recorder: Recorder, timer: NoParts) -> Recorder:
    """The recorder, telling the timer as well where there is one."""
    return TimedRecorder(recorder, timer) if isinstance(timer, PartTimer) else recorder


def timed_exchange(transport: Transport, timer: NoParts, **settings: Any) -> Exchange:
    """A rank's exchange, telling the timer as well where there is one."""
    if isinstance(timer, PartTimer):
        return TimedExchange(transport, timer=timer, **settings)
    return Exchange(transport, **settings)


def timed_sampler(sampler: SamplerOps, timer: NoParts) -> SamplerOps:
    """The sampler, telling the timer as well where there is one."""
    return TimedSampler(sampler, timer) if isinstance(timer, PartTimer) else sampler
