"""Which rank a request goes to: the one where it costs least, counted in tokens that have to be computed before it.

    cost(rank) =  queue_weight  x prompt tokens queued there
                + prefix_weight x prompt tokens of its own that are not cached there
                + cache_weight_tokens x share of the latent cache that is in use there

Prompts queue before it, its own prompt comes next, and a full cache means long steps and preemptions later on. Pure:
the same views, request and turn give the same choice. Knows what a rank reports, not what it does with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ep.errors import SerriedError


class NoRankLeft(SerriedError):
    """No rank may take a request: the message says for each of them why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """What weighs how much."""

    routing_queue_weight: float = 1.0
    """Cost of each prompt token that is queued on a rank."""

    routing_prefix_weight: float = 1.0
    """Cost of each prompt token of the request that is not in a rank's prefix cache."""

    routing_cache_weight_tokens: float = 4096.0
    """Cost, in tokens, of a latent cache that is full; part of it for one that is partly used."""

    def __post_init__(self) -> None:
        for name in ("routing_queue_weight", "routing_prefix_weight", "routing_cache_weight_tokens"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; it must be a number of at least 0, e.g. 1.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of one rank when a request is placed; views come in rank order, one a rank.

    queued_tokens     prompt tokens there that are not computed yet, those of requests on their way to it included
    used_pages        pages of its latent cache that requests hold (a page that only the prefix cache keeps is free)
    matched_tokens    leading prompt tokens of this request that its prefix cache holds
    """

    healthy: bool = True
    draining: bool = False
    queued_tokens: int = 0
    used_pages: int = 0
    num_pages: int = 1
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One rank's cost for a request, by part; `refused` says in words why it may not have it, "" when it may."""

    rank: int
    queue: float
    prefix: float
    cache: float
    refused: str = ""

    @property
    def cost(self) -> float:
        """All parts together, in tokens."""
        return self.queue + self.prefix + self.cache

    def line(self) -> str:
        """For a person."""
        if self.refused:
            return f"rank {self.rank}: not asked, {self.refused}"
        return (
            f"rank {self.rank}: cost {self.cost:.0f} = queue {self.queue:.0f} + prompt {self.prefix:.0f} "
            f"+ cache {self.cache:.0f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a request goes, and what every rank offered."""

    rank: int
    ties: int
    offers: tuple[Offer, ...]

    def explain(self) -> list[str]:
        """A line for each rank, the chosen one marked."""
        lines = [offer.line() for offer in self.offers]
        lines[self.rank] += " <- chosen" if self.ties == 1 else f" <- chosen by turn, {self.ties} alike"
        return lines


def route(views: Sequence[RankView], *, prompt_len: int, pages_needed: int, turn: int, config: RoutingConfig) -> Choice:
    """Choose a rank for a request of `prompt_len` tokens that may grow to `pages_needed` pages.

    turn counts the requests placed so far: among ranks of equal cost the choice goes round, so that no rank is always
    the first. Raises NoRankLeft when every rank is unhealthy, draining or too small.
    """
    offers = tuple(
        [
            _offer(rank, view, prompt_len=prompt_len, pages_needed=pages_needed, config=config)
            for rank, view in enumerate(views)
        ]
    )
    open_offers = [offer for offer in offers if not offer.refused]
    if not open_offers:
        raise NoRankLeft("no rank can take the request: " + "; ".join([offer.line() for offer in offers]))
    least = min([offer.cost for offer in open_offers])
    tied = [offer.rank for offer in open_offers if offer.cost == least]
    return Choice(rank=tied[turn % len(tied)], ties=len(tied), offers=offers)


def _offer(rank: int, view: RankView, *, prompt_len: int, pages_needed: int, config: RoutingConfig) -> Offer:
    return Offer(
        rank=rank,
        queue=config.routing_queue_weight * view.queued_tokens,
        prefix=config.routing_prefix_weight * (prompt_len - view.matched_tokens),
        cache=config.routing_cache_weight_tokens * view.used_pages / view.num_pages,
        refused=_refusal(view, pages_needed),
    )


def _refusal(view: RankView, pages_needed: int) -> str:
    if not view.healthy:
        return "it is unhealthy"
    if view.draining:
        return "it is draining"
    if pages_needed > view.num_pages:
        return f"the request may need {pages_needed} pages and its cache has {view.num_pages}"
    return ""
