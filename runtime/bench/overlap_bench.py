"""How much of the exchange a second track hides, measured: a real model on real ranks, behind a link made slow.

Four engines on each rank, of one and of several tracks, with the transport as it is and with the slow link; they take
turns, a few steps each, so that what else the machine does meets all alike:

    one track        | steps on the bare link |                        | steps on the slow link |
    several tracks            | steps on the bare link |                        | steps on the slow link |

The link is as slow as it takes for the rows of a step to be under way for `share` times what a rank computes in it.
"Bare" is the same link, too fast to be noticed: all four send the same messages. So what a link costs is found for each
number of tracks by itself, with the same work:

    hidden = 1 - (several slow - several bare) / (one slow - one bare)

and two half steps that compute longer than a whole one are not taken for a link that is not hidden; they are told as
throughput. The clock is the machine's, or one that runs as if each rank had a core (see `ep.slow`), where it has none.
Knows transports and workers; starts no rank and prints nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from dbo import DboConfig, Timeline, exposed_ns
from ep import ExchangeConfig, Kind, Tag, Transport
from ep.slow import CoreClock, LinkConfig, SlowTransport, WallClock

from ..assembly import Seat, assemble
from ..control.thread_control import ThreadControl
from ..failure.recorder import Unwatched
from ..forward.tracing import TracedTransport, steps_of
from ..loop.ranks import Admit, Tray
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..scheduling.scheduler import SchedulerConfig
from ..settings.config import CacheConfig, EngineConfig
from ..settings.settling import settle

_BLOCK = 4
"""Steps that an engine takes in a row."""
_WARM = 3
_CHECK = Tag(0, 0, 0, 0, Kind.CHECK)
_LONGEST = 256
BARE = LinkConfig(link_bytes_per_s=1e15)
"""Too fast to be noticed; it sends the same messages as a slow one."""
"""Tokens of a request, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLoad:
    """What is measured.

    requests, prompt_len   that decode on each rank
    rounds                 turns of each engine, of 4 steps
    share                  communication over compute, by the link
    link_latency_us        of the link besides
    clock                  the machine's, or one that runs as if each rank had a core to itself
    """

    requests: int = 128
    prompt_len: int = 40
    rounds: int = 6
    share: float = 1.0
    link_latency_us: float = 0.0
    tracks: int = 2
    order: Literal["abreast", "staggered"] = "abreast"
    exchange: Literal["exact", "bounded"] = "bounded"
    clock: Literal["wall", "core"] = "wall"

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("prompt_len", 1), ("rounds", 1), ("tracks", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}, e.g. {least}")
        most = _LONGEST - _WARM - _BLOCK * self.rounds
        if self.prompt_len > most:
            raise ValueError(
                f"prompt_len is {self.prompt_len}; prompt and {self.rounds} rounds must fit {_LONGEST} tokens, e.g. 4"
            )
        if not 0 < self.share < float("inf"):
            raise ValueError(f"share is {self.share}; it must be above 0, e.g. 1")


class EngineTimes(NamedTuple):
    """Of one engine's steps on one rank, milliseconds; `exposed_ms` is waiting while no track computed.

    The quarter of the steps that took least took at most so long: what else a machine does only adds to a step.
    """

    wall_ms: float
    cpu_ms: float
    exposed_ms: float


class OverlapTimes(NamedTuple):
    """What one rank measured, and the link's bytes a second."""

    one: EngineTimes
    one_slow: EngineTimes
    cut: EngineTimes
    cut_slow: EngineTimes
    link_bytes_per_s: float

    @property
    def hidden_by_wall(self) -> float:
        """The share of what the slow link costs one track that it does not cost several."""
        costs = self.one_slow.wall_ms - self.one.wall_ms
        return 1.0 - (self.cut_slow.wall_ms - self.cut.wall_ms) / costs

    @property
    def hidden_by_trace(self) -> float:
        """The same from the timelines: of the waiting that the slow link adds to one track, what it spares several."""
        added = self.one_slow.exposed_ms - self.one.exposed_ms
        return 1.0 - (self.cut_slow.exposed_ms - self.cut.exposed_ms) / added


class Lab:
    """One engine on one rank: a worker whose requests decode, its timeline, and what its steps took."""

    def __init__(self, config: EngineConfig, load: OverlapLoad, transport: Transport, *, link: LinkConfig) -> None:
        self.clock = CoreClock() if load.clock == "core" else WallClock()
        self.timeline = Timeline(now=self.clock.now)
        self.slow = SlowTransport(transport, link, clock=self.clock)
        self._transport = transport
        self._tray = Tray()
        seat = Seat(
            transport=TracedTransport(self.slow, self.timeline),
            control=ThreadControl(transport),
            recorder=Unwatched(),
            emit=lambda _: None,
            notify=lambda _: None,
            inbox=self._tray,
            timeline=self.timeline,
        )
        [self.worker] = assemble(settle(config), seats=[seat], drafter=None, on_plan=None, on_progress=None).workers
        for request in _requests(load, vocab=self.worker.decoder.model.vocab_size):
            self._tray.put(Admit(request=request))
        self._wall_ns: list[int] = []
        self._cpu_ns: list[int] = []

    def steps(self, count: int, *, keep: bool = True) -> None:
        """Take so many steps; all ranks at the same time."""
        with torch.inference_mode():
            for _ in range(count):
                begin = self.clock.now(), time.thread_time_ns()
                self.worker.step()
                took_ns = time.thread_time_ns() - begin[1]
                self._meet()
                if keep:
                    self._wall_ns.append(self.clock.now() - begin[0])
                    self._cpu_ns.append(took_ns)

    def _meet(self) -> None:
        """No rank is earlier than another, by its own clock: the next step begins with a vote."""
        now_1 = torch.tensor([self.clock.now()])
        self.clock.wait_until(int(self._transport.all_gather(now_1, tag=_CHECK).wait().max()))

    def times(self) -> EngineTimes:
        """Of the steps that were kept."""
        exposed = [exposed_ns(parts) for _, parts in steps_of(self.timeline.spans)][-len(self._wall_ns) :]
        return EngineTimes(*[_quarter(values) / 1e6 for values in (self._wall_ns, self._cpu_ns, exposed)])


def measure_overlap(transport: Transport, config: EngineConfig, load: OverlapLoad) -> tuple[OverlapTimes, Timeline]:
    """On all ranks of `transport` at the same time: what this rank measured, and the timeline of the several tracks
    behind the slow link."""
    one, cut = _config(config, load, dbo="off"), _config(config, load, dbo="on")
    link = find_link(transport, one, load)
    labs = [
        Lab(config, load, transport, link=link) for config, link in ((one, BARE), (one, link), (cut, BARE), (cut, link))
    ]
    for lab in labs:
        lab.steps(_WARM, keep=False)
    for _ in range(load.rounds):
        for lab in labs:
            lab.steps(_BLOCK)
    times = [lab.times() for lab in labs]
    return OverlapTimes(*times, link_bytes_per_s=link.link_bytes_per_s or 0.0), labs[-1].timeline


def find_link(transport: Transport, config: EngineConfig, load: OverlapLoad) -> LinkConfig:
    """The link that makes communication `load.share` times as long as a step's compute; equal on all ranks."""
    lab = Lab(config, load, transport, link=BARE)
    lab.steps(_WARM, keep=False)
    before = lab.slow.num_bytes
    lab.steps(2 * _BLOCK)
    sent = (lab.slow.num_bytes - before) / (2 * _BLOCK)
    mine = torch.tensor([lab.times().cpu_ms / 1e3, sent], dtype=torch.float64)
    all_R2 = transport.all_gather(mine, tag=_CHECK).wait()
    compute_s, most_bytes = all_R2.amax(0).tolist()
    return LinkConfig(
        link_latency_us=load.link_latency_us, link_bytes_per_s=max(most_bytes, 1.0) / (load.share * compute_s)
    )


def compare_cpu(
    transport: Transport, config: EngineConfig, load: OverlapLoad, choices: Sequence[DboConfig]
) -> list[tuple[EngineTimes, int]]:
    """Engines of these choices on the bare transport, in turns: what their steps took, and how many were cut."""
    labs = [Lab(replace(config, overlap=choice), load, transport, link=BARE) for choice in choices]
    for lab in labs:
        lab.steps(_WARM, keep=False)
    for _ in range(load.rounds):
        for lab in labs:
            lab.steps(_BLOCK)
    return [(lab.times(), lab.worker.stats().cut_steps) for lab in labs]


def _quarter(values: Sequence[int]) -> float:
    return statistics.quantiles(values, n=4)[0]


def _config(config: EngineConfig, load: OverlapLoad, *, dbo: Literal["off", "on"]) -> EngineConfig:
    overlap = DboConfig(
        dbo=dbo,
        dbo_tracks=load.tracks,
        dbo_order=load.order,
        dbo_decode_token_threshold=1,
    )
    return replace(config, overlap=overlap)


def bench_config(model: str, *, ranks: int, load: OverlapLoad) -> EngineConfig:
    """An engine of random weights with room for the load, in float32.

    Bounded, for an exact exchange waits for counts before it sends rows, and the counts for the other track's rows.
    """
    return EngineConfig(
        model=model,
        ranks=ranks,
        dtype="float32",
        load_format="dummy",
        exchange=ExchangeConfig(exchange=load.exchange),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=load.requests, max_num_batched_tokens=8192, max_model_len=_LONGEST),
    )


def _requests(load: OverlapLoad, *, vocab: int) -> list[Request]:
    """None of them ends while it is measured."""
    numbers = random.Random(0)
    return [
        Request(
            id=str(index),
            prompt=tuple(numbers.choices(range(2, vocab), k=load.prompt_len)),
            params=SamplingParams(temperature=0.0, max_tokens=_LONGEST - load.prompt_len, ignore_eos=True),
            arrival=index,
            seed=index,
        )
        for index in range(load.requests)
    ]
