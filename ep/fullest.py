"""How many rows the fullest (source, destination) pair of an exchange has: pure arithmetic over what was measured or is
expected of level routing.

    rows of one (source, destination) pair, of a bucket of 128 tokens

    nothing known     binomial: 64 expected, in one of 1,000,000 exchanges some pair has more than 97  ->  97
    measured          the fullest pair of each recorded exchange: in 999 of 1,000 it had at most 91    ->  91

Knows numbers only: not what a pair is a pair of, nor what a row weighs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

TAIL = 1e-6
"""Chance at most that some pair of an exchange has more rows than places, under uniform routing."""


class Fullest(Protocol):
    """Rows of the fullest pair of one exchange."""

    def places(self, bucket: int) -> int:
        """Enough for an exchange of this bucket."""
        ...

    def risk(self, bucket: int, places: int) -> float:
        """Chance that some pair of one exchange has more rows than places."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRows:
    """Everything fits: `per_token` rows of every token."""

    per_token: int = 1

    def places(self, bucket: int) -> int:
        return bucket * self.per_token

    def risk(self, bucket: int, places: int) -> float:
        return float(places < self.places(bucket))


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRows:
    """A number somebody set; nothing is known of its risk."""

    number: int

    def places(self, bucket: int) -> int:  # noqa: ARG002
        return self.number

    def risk(self, bucket: int, places: int) -> float:
        return float("nan") if places < bucket else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BinomialRows:
    """Routing as level as chance: each of `per_token` trials of a token gives a row with the same chance."""

    per_token: int
    chance: float
    num_pairs: int
    tail: float = TAIL

    def places(self, bucket: int) -> int:
        return _binomial_quantile(bucket * self.per_token, self.chance, self.tail / self.num_pairs)

    def risk(self, bucket: int, places: int) -> float:
        more = binomial_tail(bucket * self.per_token, self.chance, places)
        return -math.expm1(self.num_pairs * math.log1p(-min(more, 1 - 1e-16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """What was counted in exchanges of `tokens` tokens a rank. Other buckets: the mean grows like the tokens, what is
    above it like their square root."""

    tokens: int
    mean: float
    """Rows of a pair, over all exchanges and pairs."""
    fullest: tuple[int, ...]
    """Rows of the fullest pair of each exchange, ascending."""
    quantile: float

    def places(self, bucket: int) -> int:
        place = min(math.ceil(self.quantile * len(self.fullest)), len(self.fullest)) - 1
        above = max(self.fullest[max(place, 0)] - self.mean, 0.0)
        return math.ceil(self.mean * bucket / self.tokens + above * math.sqrt(bucket / self.tokens) - 1e-9)

    def risk(self, bucket: int, places: int) -> float:
        scale = math.sqrt(max(bucket, 1) / self.tokens)
        limit = self.mean + (places - self.mean * scale * scale) / scale
        more = sum(rows > limit + 1e-9 for rows in self.fullest)
        return (more + 1) / (len(self.fullest) + 2)  # what never happened yet may still happen


def measure(counts: Sequence[Sequence[int]], *, tokens: int, quantile: float = 0.999) -> MeasuredRows:
    """From the rows of all pairs, one sequence an exchange, of exchanges with `tokens` tokens on each rank."""
    if not counts:
        raise ValueError("counts is empty: capacities need at least one recorded exchange")
    fullest = tuple(sorted(max(pairs) for pairs in counts))
    mean = sum(sum(pairs) for pairs in counts) / sum(len(pairs) for pairs in counts)
    return MeasuredRows(tokens=tokens, mean=mean, fullest=fullest, quantile=quantile)


@lru_cache(maxsize=4096)
def _binomial_quantile(trials: int, chance: float, tail: float) -> int:
    """The smallest c for which more than c successes have a chance of at most `tail`."""
    low, high = math.floor(trials * chance), trials
    while low < high:
        middle = (low + high) // 2
        if binomial_tail(trials, chance, middle) <= tail:
            high = middle
        else:
            low = middle + 1
    return low


def binomial_tail(trials: int, chance: float, places: int) -> float:
    """Chance of more than `places` successes in so many trials."""
    if places >= trials or chance <= 0.0:
        return 0.0
    if chance >= 1.0:
        return 1.0
    log_odds = math.log(chance) - math.log1p(-chance)
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(places + 2)
        - math.lgamma(trials - places)
        + (places + 1) * math.log(chance)
        + (trials - places - 1) * math.log1p(-chance)
    )
    total, term = 0.0, math.exp(log_term)
    for number in range(places + 1, trials + 1):
        total += term
        if number < trials:
            term *= (trials - number) / (number + 1) * math.exp(log_odds)
        if term < total * 1e-17 and number > trials * chance:
            break
    return min(total, 1.0)


def chance_of_part(num_slots: int, parts: int, top_k: int) -> float:
    """That one of `parts` equal parts of the slots holds any of a token's: 1 - C(E - E/P, k) / C(E, k)."""
    elsewhere = num_slots - num_slots // parts
    places = range(min(top_k, num_slots))
    return 1.0 - math.prod(max(elsewhere - place, 0) / (num_slots - place) for place in places)
