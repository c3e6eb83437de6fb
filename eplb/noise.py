"""The load of the fullest rank that a step is likely to see, when tokens choose their experts by chance.

A token visits a copy with some probability q, so the rows a rank gets in a step of T tokens have mean T sum(q) and
variance T sum(q (1 - q)) over its copies: a sum of shares of a multinomial, its small negative covariances left out.
Ranks are taken as independent and normal; then P(maximum < x) is a product, and E[maximum] the integral of 1 - product.

Only single IEEE operations in a fixed order, and a table of the normal distribution rounded to 12 digits: every machine
finds the same number, so ranks that each plan for themselves agree.

Legend: B rows, R ranks, L local slots of a rank.
"""

from __future__ import annotations

import math

import numpy as np

_STEPS_PER_SIGMA, _REACH = 32, 6
_PHI = np.array(
    [
        round(0.5 * (1.0 + math.erf(step / _STEPS_PER_SIGMA / math.sqrt(2.0))), 12)
        for step in range(-_REACH * _STEPS_PER_SIGMA, _REACH * _STEPS_PER_SIGMA + 2)
    ]
)
_POINTS = 48


def step_moments(parts_BRL: np.ndarray, *, top_k: int, tokens: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 [B, R] twice: mean and variance of the rows each rank gets in a step of `tokens` tokens.

    parts_BRL   part of all (token, expert) pairs that each slot gets; a row adds up to 1
    """
    chance_BRL = np.minimum(parts_BRL * top_k, 1.0)
    return tokens * _in_order(parts_BRL * top_k), tokens * _in_order(chance_BRL * (1.0 - chance_BRL))


def expected_maximum(means_BR: np.ndarray, variances_BR: np.ndarray) -> np.ndarray:
    """float64 [B]: mean of the largest of R independent normal numbers; without variance, the largest mean."""
    sigma_BR = np.sqrt(variances_BR)
    top_B = means_BR.max(axis=1)
    low_B = (means_BR - _REACH * sigma_BR).max(axis=1)
    high_B = (means_BR + _REACH * sigma_BR).max(axis=1)
    step_B = (high_B - low_B) / (_POINTS - 1)
    safe_RB = np.where(sigma_BR > 0, sigma_BR, 1.0).T
    above_B = np.zeros_like(top_B)
    for point in range(_POINTS):
        weight = 0.5 if point in (0, _POINTS - 1) else 1.0
        at_B = low_B + point * step_B
        above_B += weight * (1.0 - np.multiply.reduce(_normal((at_B - means_BR.T) / safe_RB), axis=0))
    return np.where(step_B > 0, low_B + step_B * above_B, top_B)


def _normal(z: np.ndarray) -> np.ndarray:
    """The normal distribution by straight lines between the table's places; exact to 4e-5."""
    place = (np.clip(z, -_REACH, _REACH) + _REACH) * _STEPS_PER_SIGMA
    left = place.astype(np.int64)
    return _PHI[left] + (place - left) * (_PHI[left + 1] - _PHI[left])


def _in_order(values_BRL: np.ndarray) -> np.ndarray:
    """Sum over the last axis, one after the other."""
    return np.add.reduce(np.ascontiguousarray(np.moveaxis(values_BRL, 2, 0)), axis=0)
