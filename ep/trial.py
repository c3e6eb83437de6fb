"""Which way of exchange serves best here: build each, put it through the self-test, time it, keep the fastest.

    in turn, on all ranks together    can it be had? | build | each pattern of the self-test | time
    after each of these               ranks say how it went, in words; one that failed anywhere is dropped everywhere

Each is closed before the next is built, so that only one's memory is ever held, and a winner that was not the last is
built again. (What cannot give its memory back comes last.) A way that hangs, or ends the process, cannot be dropped: it
ends the start, and a user leaves it out. Knows no clock and no mode; what is built and how it is timed is handed in.

Legend: R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .config import ExchangeConfig
from .errors import TransportError
from .exchange import Exchange
from .selftest import patterns
from .transport import Kind, Tag, Transport

WORD_BYTES = 240
"""What a rank may say of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How one way went, the same on all ranks: microseconds of a round on the slowest rank, or a fault."""

    config: ExchangeConfig
    us: float | None = None
    fault: str = ""

    @property
    def name(self) -> str:
        """In a word or three."""
        return f"{self.config.exchange} by node" if self.config.hierarchical == "on" else self.config.exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried and how.

    lacks      why this rank cannot have it, None where it can; asked before anybody builds it
    build      the exchange
    time_us    a dispatch and combine as a step makes them
    """

    configs: Sequence[ExchangeConfig]
    lacks: Callable[[ExchangeConfig], str | None]
    build: Callable[[ExchangeConfig], Exchange]
    time_us: Callable[[Exchange], float]


def fastest(trial: Trial, transport: Transport, *, device: torch.device | str) -> tuple[Exchange, list[Tried]]:
    """All ranks together: the exchange that was fastest of those that passed, the first of equals, and how all went.

    TransportError when none passed, with what each failed at.
    """
    votes = _Votes(transport, device)
    tried: list[Tried] = []
    latest: Exchange | None = None
    for config in trial.configs:
        if latest is not None:
            latest.close()
        result, latest = _try(trial, config, votes)
        tried.append(result)
    if all(each.us is None for each in tried):
        faults = "; ".join(f"{each.name}: {each.fault}" for each in tried)
        raise TransportError(f"no way of exchange passes its self-test: {faults}", rank=transport.rank)
    best = best_of(tried)
    if latest is not None and best is tried[-1]:
        return latest, tried
    if latest is not None:
        latest.close()
    return trial.build(best.config), tried


def best_of(tried: Sequence[Tried]) -> Tried:
    """The fastest of those that passed."""
    return min((each for each in tried if each.us is not None), key=lambda each: each.us or 0.0)


def lines(tried: Sequence[Tried]) -> list[str]:
    """For people: the choice with all times, then a warning for each that was dropped."""
    best = best_of(tried)
    times = ", ".join(f"{each.name} {each.us:,.0f} us" for each in tried if each.us is not None)
    told = [f"exchange: {best.name}, the fastest that passed its self-test; a round on the slowest rank: {times}"]
    dropped = [each for each in tried if each.us is None]
    return told + [f"warning: exchange {each.name} is not used: {each.fault}" for each in dropped]


class _Votes:
    """What all ranks say of one thing."""

    def __init__(self, transport: Transport, device: torch.device | str) -> None:
        self._transport = transport
        self._device = device
        self._tags: Iterator[Tag] = (Tag(step, 0, 0, 0, Kind.CHECK) for step in itertools.count())

    def fault(self, words: str | None) -> str | None:
        """The first rank's that has one, with its name; None: nobody has."""
        mine = (words or "").encode()[:WORD_BYTES]
        row = torch.tensor(list(mine.ljust(WORD_BYTES, b"\0")), dtype=torch.uint8, device=self._device)
        heard = self._transport.all_gather(row, tag=next(self._tags)).wait().tolist()
        said = [bytes(each).rstrip(b"\0").decode(errors="ignore") for each in heard]
        return next((f"{each} (rank {rank})" for rank, each in enumerate(said) if each), None)

    def slowest(self, value: float) -> float:
        """The largest that a rank says."""
        row = torch.tensor([value], dtype=torch.float64, device=self._device)
        return float(self._transport.all_gather(row, tag=next(self._tags)).wait().max())


def _try(trial: Trial, config: ExchangeConfig, votes: _Votes) -> tuple[Tried, Exchange | None]:
    """How it went, and the exchange if it passed."""
    fault = votes.fault(trial.lacks(config))
    if fault is not None:
        return Tried(config=config, fault=fault), None
    built: list[Exchange] = []
    fault = votes.fault(_attempt(lambda: built.append(trial.build(config))))
    if fault is None:
        fault = _test(built[0], votes)
    times: list[float] = []
    if fault is None:
        fault = votes.fault(_attempt(lambda: times.append(trial.time_us(built[0]))))
    if fault is None:
        built[0].take_bytes()
        return Tried(config=config, us=votes.slowest(times[0])), built[0]
    for exchange in built:
        exchange.close()
    return Tried(config=config, fault=fault), None


def _test(exchange: Exchange, votes: _Votes) -> str | None:
    """Each pattern, and whether all ranks are content before the next."""
    for pattern in patterns(exchange):
        fault = votes.fault(_attempt(pattern))
        if fault is not None:
            return fault
    return votes.fault(_attempt(exchange.check_faults))


def _attempt(work: Callable[[], object]) -> str | None:
    """What it failed with, in words. Errors of back ends are of any kind, so all count; the group hears of each."""
    try:
        work()
    except Exception as error:  # a library's own errors are of its own kinds
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return None
