"""`serried simulate route`: where requests go, and why, as weights and the state of ranks change.

The choice is the engine's own (`runtime.ranks.routing`); ranks are numbers that grow with every request they get.
Nothing is decoded, so no request ever ends.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import tyro
from rich.console import Console

from runtime.ranks.routing import Choice, RankView, RoutingConfig, route
from runtime.weights.memory import pages_of

from ..groups.refusal import refusals

ABOUT = """\
Show which rank takes each of some requests, and what every rank would have cost, by the engine's own rule.

Examples:
  serried simulate route
  serried simulate route --routing-prefix-weight 0
  serried simulate route --routing-queue-weight 3 --requests 4
  serried simulate route --queued 0 0 9000 --used 0.9 0.1 0.1 --matched 0 1024 3000

A rank is a place in --queued (prompt tokens waiting there), --used (share of its cache) and --matched (leading tokens
of the prompt that its prefix cache has). The defaults are four ranks, each for a reason: one idle, one with the
prompt's beginning but a queue, one with all of it but a full cache, and one that is busy.
"""

DONE = 0
PAGE = 64
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFlags:
    """What `serried simulate route` is told."""

    prompt_len: int = 4096
    """Tokens of each request's prompt."""

    max_tokens: int = 512
    """Tokens it may grow by."""

    requests: int = 3
    """Requests that come, one after the other, all with the same beginning."""

    queued: tuple[int, ...] = (0, 2500, 600, 9000)
    """Prompt tokens that wait on each rank."""

    used: tuple[float, ...] = (0.05, 0.4, 0.97, 0.6)
    """Share of each rank's cache that is in use."""

    matched: tuple[int, ...] = (0, 2048, 4032, 0)
    """Leading tokens of the prompt in each rank's prefix cache."""

    draining: tuple[int, ...] = ()
    """Ranks that take nothing new."""

    num_blocks: int = 3285
    """Pages of 64 tokens a rank has."""

    routing: tyro.conf.OmitArgPrefixes[RoutingConfig] = field(default_factory=RoutingConfig)

    json: Switch = False
    """End with one JSON object."""

    def __post_init__(self) -> None:
        ranks = {len(self.queued), len(self.used), len(self.matched)}
        if len(ranks) != 1 or not self.queued:
            raise ValueError(
                f"queued, used and matched have {len(self.queued)}, {len(self.used)} and {len(self.matched)} places; "
                "each must have one for each rank, e.g. --queued 0 100 --used 0.1 0.2 --matched 0 0"
            )
        for name, most in (("prompt_len", 1 << 24), ("requests", 1000), ("num_blocks", 1 << 24)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from 1 to {most}, e.g. {min(most, 1000)}"
                )
        if self.max_tokens < 1 or min(self.queued) < 0 or not all(0 <= share <= 1 for share in self.used):
            raise ValueError("max_tokens must be at least 1, queued at least 0 and used from 0 to 1, e.g. 0.5")
        if not all(0 <= tokens < self.prompt_len for tokens in self.matched):
            raise ValueError(f"matched is {self.matched}; it must be below prompt_len {self.prompt_len}, e.g. 0")
        if not all(0 <= rank < len(self.queued) for rank in self.draining):
            raise ValueError(f"draining is {self.draining}; there are ranks 0 to {len(self.queued) - 1}, e.g. 0")


def run(flags: RouteFlags) -> int:
    """Print the choices; returns 0. Raises Refusal when no rank may take a request."""
    with refusals():
        choices = play(flags, flags.routing)
        usual = play(flags, RoutingConfig())
    out = Console(highlight=False, soft_wrap=True)
    weights = ", ".join([f"{item.name} {getattr(flags.routing, item.name):g}" for item in fields(RoutingConfig)])
    out.print(f"prompts of {flags.prompt_len:,} tokens; {weights}", markup=False)
    for number, choice in enumerate(choices):
        out.print(f"\nrequest {number}", markup=False)
        for line in choice.explain():
            out.print(f"  {line}", markup=False)
        out.print(f"  because {reason(choice)}", markup=False)
    out.print()
    for line in (_counts("these weights", choices), _counts("the default weights", usual)):
        out.print(line, markup=False)
    if flags.json:
        print(json.dumps(record(choices, usual)))
    return DONE


def play(flags: RouteFlags, config: RoutingConfig) -> list[Choice]:
    """Each request's choice; it queues where it goes, and its beginning is in that rank's prefix cache from then on.

    Raises NoRankLeft when every rank is draining or too small.
    """
    views = [
        RankView(
            draining=rank in flags.draining,
            queued_tokens=queued,
            used_pages=round(used * flags.num_blocks),
            num_pages=flags.num_blocks,
            matched_tokens=matched,
        )
        for rank, (queued, used, matched) in enumerate(zip(flags.queued, flags.used, flags.matched, strict=True))
    ]
    needed = pages_of(flags.prompt_len + flags.max_tokens, PAGE)
    choices = []
    for turn in range(flags.requests):
        choice = route(views, prompt_len=flags.prompt_len, pages_needed=needed, turn=turn, config=config)
        choices.append(choice)
        views[choice.rank] = _after(views[choice.rank], flags, needed)
    return choices


def reason(choice: Choice) -> str:
    """In which part the chosen rank is ahead of the next best, and what it gives up for that."""
    chosen = choice.offers[choice.rank]
    others = [offer for offer in choice.offers if not offer.refused and offer.rank != choice.rank]
    if not others:
        return "no other rank may have it"
    rival = min(others, key=lambda offer: offer.cost)
    if rival.cost == chosen.cost:
        return f"it is its turn: rank {rival.rank} costs as much"
    gains = {name: getattr(rival, name) - getattr(chosen, name) for name in ("queue", "prefix", "cache")}
    words = {"queue": "less waits there", "prefix": "more of the prompt is cached", "cache": "its cache has more room"}
    ahead = [f"{words[name]} ({gain:,.0f})" for name, gain in gains.items() if gain > 0]
    behind = [f"{name} ({-gain:,.0f})" for name, gain in gains.items() if gain < 0]
    against = f", which outweighs its {' and '.join(behind)}" if behind else ""
    return f"of rank {rival.rank} and it, {' and '.join(ahead)}{against}"


def record(choices: list[Choice], usual: list[Choice]) -> dict[str, Any]:
    """For a program."""
    return {
        "ranks": [choice.rank for choice in choices],
        "default_ranks": [choice.rank for choice in usual],
        "offers": [
            [{"queue": offer.queue, "prefix": offer.prefix, "cache": round(offer.cache, 3)} for offer in choice.offers]
            for choice in choices
        ],
    }


def _after(view: RankView, flags: RouteFlags, needed: int) -> RankView:
    """With one more request on it."""
    fresh = flags.prompt_len - view.matched_tokens
    whole_pages = (flags.prompt_len - 1) // PAGE * PAGE
    return replace(
        view,
        queued_tokens=view.queued_tokens + fresh,
        used_pages=min(view.used_pages + needed, view.num_pages),
        matched_tokens=max(view.matched_tokens, whole_pages),
    )


def _counts(name: str, choices: list[Choice]) -> str:
    found = Counter([choice.rank for choice in choices])
    return f"{name:<20} " + ", ".join([f"rank {rank}: {count}" for rank, count in sorted(found.items())])
