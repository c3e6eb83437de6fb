"""What comes to a simulated group, and what one is to look at: three scenes that show what the prefill cadence does.

    steady              a stream of prompts, at 80% of what interval 1 just sustains
    one-long-prefill    all ranks decode, and one gets a long prompt
    burst               all ranks decode, and as many prompts as there are ranks come at once

A scene is arrivals, drawn from a seed, and the times in which people's waits are read. Knows no cadence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..costs.costs import StepCosts
from .simulated_faults import Fault
from .simulated_front import Arrival
from .simulation import GroupConfig, Simulation
from .simulation_record import Measures, Run, Window, measure

ScenarioName = Literal["steady", "one-long-prefill", "burst"]

INTERVAL_1_LIMIT = 3.75
"""Requests of 1,024 + 200 tokens a second and rank that interval 1 just sustains: 8 ranks, H200 costs, all else as by
default. Found with these simulations: with 29 a second on 8 ranks the wait for a first token does not grow, with 30 it
depends on the seed, with 31 it grows for as long as requests come."""

LOAD = 0.8
"""Of that limit, in the scene `steady`: 3 requests a second and rank."""

STEADY_SECONDS = 60.0

_FILLED = 35 / 60
"""The share of a steady stream after which as many requests end as come, also where a token takes 180 ms."""

_NUM_BACKGROUND = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scene.

    focus       arrivals [begin, end) that the scene is about
    until       arrivals [begin, end) whose end is the scene's
    waits       when people's waits are read; throughput counts from `focus` on, to the end
    step_tokens tokens that a rank computes in a step at most, unless told otherwise
    about       what is to be seen, for a person
    """

    name: ScenarioName
    about: str
    arrivals: tuple[Arrival, ...]
    focus: tuple[int, int]
    until: tuple[int, int]
    waits: Window
    step_tokens: int = 8192

    @property
    def event_us(self) -> float:
        """When what the scene is about begins."""
        return self.arrivals[self.focus[0]].at_us

    def play(self, config: GroupConfig, costs: StepCosts, *, seed: int = 0, faults: Sequence[Fault] = ()) -> Simulation:
        """This scene, ready to `run`."""
        return Simulation(config, costs, self.arrivals, seed=seed, faults=faults, until=range(*self.until))

    def measure(self, run: Run) -> Measures:
        """What came of it."""
        return measure(run, waits=self.waits, work=Window(begin_us=self.event_us))


def make_scenario(
    name: str, *, ranks: int, seed: int, rate: float | None = None, seconds: float | None = None
) -> Scenario:
    """The scene called `name` for so many ranks. `rate` (requests a second, all ranks together) and `seconds` are of
    `steady` only. ValueError for other names and for times that make no sense."""
    if name == "steady":
        return steady(
            seed=seed,
            rate=LOAD * INTERVAL_1_LIMIT * ranks if rate is None else rate,
            seconds=STEADY_SECONDS if seconds is None else seconds,
        )
    if name not in get_args(ScenarioName):
        raise ValueError(f"scenario is {name!r}; it must be one of {', '.join(get_args(ScenarioName))}, e.g. steady")
    for field, value in (("rate", rate), ("seconds", seconds)):
        if value is not None:
            raise ValueError(f"{field} is {value}; it must be left out, since scenario {name} has its own times")
    return one_long_prefill(ranks=ranks, seed=seed) if name == "one-long-prefill" else burst(ranks=ranks, seed=seed)


def steady(*, seed: int, rate: float, seconds: float) -> Scenario:
    """Prompts of 1k with outputs of 200, at random times. First the ranks fill up; the rest is looked at."""
    for field, value in (("rate", rate), ("seconds", seconds)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{field} is {value}; it must be above 0, e.g. 24")
    draw = random.Random(f"{seed} steady")
    arrivals = [Arrival(at_us=0.0, prompt_len=1024, max_tokens=200)]
    at = draw.expovariate(rate)
    while at < seconds:
        arrivals.append(Arrival(at_us=at * 1e6, prompt_len=1024, max_tokens=200))
        at += draw.expovariate(rate)
    filled = _FILLED * seconds
    return Scenario(
        name="steady",
        about=f"prompts of 1k, outputs of 200, {rate:g} requests/s for {seconds:g} s; waits read from {filled:g} s on",
        arrivals=tuple(arrivals),
        focus=(0, len(arrivals)),
        until=(0, len(arrivals)),
        waits=Window(begin_us=filled * 1e6, end_us=seconds * 1e6),
    )


def one_long_prefill(*, ranks: int, seed: int) -> Scenario:
    """All ranks decode, and a prompt of 32k lands on one; the scene ends with its first token."""
    background = _background(ranks, max_tokens=4000)
    at_us = _event_us(seed)
    end = len(background) + 1
    return Scenario(
        name="one-long-prefill",
        about=f"{_NUM_BACKGROUND} requests decode on each rank, and a prompt of 32k lands on one",
        arrivals=(*background, Arrival(at_us=at_us, prompt_len=32768, max_tokens=1)),
        focus=(end - 1, end),
        until=(end - 1, end),
        waits=Window(begin_us=at_us),
    )


def burst(*, ranks: int, seed: int) -> Scenario:
    """All ranks decode, and prompts of 6k come at once, as many as ranks; each takes several steps to compute.

    The same tokens are computed under every cadence, so throughput says who is done first.
    """
    background = _background(ranks, max_tokens=90)
    at_us = _event_us(seed)
    prompts = [Arrival(at_us=at_us, prompt_len=6144, max_tokens=100) for _ in range(ranks)]
    end = len(background) + ranks
    return Scenario(
        name="burst",
        about=f"{_NUM_BACKGROUND} requests decode on each rank, and {ranks} prompts of 6k come at once",
        arrivals=(*background, *prompts),
        focus=(len(background), end),
        until=(0, end),
        waits=Window(begin_us=at_us),
        step_tokens=2048,
    )


def _background(ranks: int, *, max_tokens: int) -> list[Arrival]:
    """Short prompts at the start, so that all ranks decode from then on."""
    return [
        Arrival(at_us=0.0, prompt_len=256, max_tokens=max_tokens, rank=rank)
        for rank in range(ranks)
        for _ in range(_NUM_BACKGROUND)
    ]


def _event_us(seed: int) -> float:
    """When it happens: all ranks decode by then, and the seed decides at which moment of the cadence."""
    return 1.5e6 + random.Random(f"{seed} event").uniform(0, 0.4e6)
