"""How unevenly the experts' ranks are loaded in a step, before anything was recorded: expectations under stated laws.

    level        experts moved and copied to suit their loads: what is left is chance, and loads that change meanwhile
    as loaded    experts in order: popularity is log-normal with sigma 1, so that the hottest of 256 has ten times the
                 mean, as recordings of V3-class models show

Pure; what was recorded of a real model is `eplb`'s to say.
"""

from __future__ import annotations

import heapq
import math
from functools import cache
from statistics import NormalDist

import numpy as np

from eplb.noise import expected_maximum, step_moments

DRIFT = 1.05
"""Loads are not what they were when experts moved: on published recordings about 5 points above chance are left."""
SIGMA = 1.0
_LAYERS = 16


@cache
def level_imbalance(
    *, ranks: int, experts: int, redundant: int, top_k: int, tokens: float, drift: float = DRIFT
) -> float:
    """Rows of the fullest rank over the mean in a step of `tokens` a rank, experts placed to suit; 1 for one rank.

    A copy that is busier than a rank's whole share cannot be placed well: more copies of it can.
    """
    if ranks == 1 or tokens <= 0 or not experts:
        return 1.0
    slots_per_rank = -(-(experts + redundant) // ranks)
    parts_BRL = np.full((1, ranks, slots_per_rank), 1.0 / (ranks * slots_per_rank))
    busiest = ranks * _busiest_copy(experts, redundant)
    return drift * max(busiest, 1.0) * _over_mean(parts_BRL, top_k=top_k, tokens=ranks * tokens)


@cache
def _busiest_copy(experts: int, redundant: int) -> float:
    """Share of all rows that the busiest copy gets when each copy more goes to whichever expert needs it most."""
    copies = [(-share, share, 1) for share in _popularity(experts)]
    heapq.heapify(copies)
    for _ in range(redundant):
        _, share, count = copies[0]
        heapq.heapreplace(copies, (-share / (count + 1), share, count + 1))
    return -copies[0][0]


@cache
def loaded_imbalance(*, ranks: int, experts: int, top_k: int, tokens: float) -> float:
    """The same with experts in order, each where its number says; the mean over layers. Ranks need not divide them."""
    if ranks == 1 or tokens <= 0 or not experts:
        return 1.0
    held = -(-experts // ranks)
    draws, popular_E = np.random.default_rng(0), np.array(_popularity(experts))
    parts_BE = np.stack([draws.permutation(popular_E) for _ in range(_LAYERS)])
    padded_BE = np.pad(parts_BE, ((0, 0), (0, ranks * held - experts)))
    return _over_mean(padded_BE.reshape(_LAYERS, ranks, held), top_k=top_k, tokens=ranks * tokens)


def _popularity(experts: int) -> list[float]:
    """Shares of all rows, ascending: the law's own quantiles."""
    popular = [math.exp(SIGMA * NormalDist().inv_cdf((place + 0.5) / experts)) for place in range(experts)]
    total = math.fsum(popular)
    return [each / total for each in popular]


def _over_mean(parts_BRL: np.ndarray, *, top_k: int, tokens: float) -> float:
    means_BR, variances_BR = step_moments(parts_BRL, top_k=top_k, tokens=tokens)
    ratios_B = expected_maximum(means_BR, variances_BR) / means_BR.mean(axis=1)
    return max(float(ratios_B.mean()), 1.0)
