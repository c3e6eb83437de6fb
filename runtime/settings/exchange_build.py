"""The exchange of one rank: the one that was settled, or the fastest of several that ranks try when they start.

Knows what an exchange and a trial need of a settled configuration; how a trial goes is `ep.trial`, how long a round
takes `exchange_times`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ep import Exchange, ExchangeConfig, ExchangeOps, Transport
from ep.back_ends import MAKERS, opener, refusal
from ep.blueprint import Blueprint
from ep.lanes import Lanes
from ep.parts import BackEnd
from ep.trial import Trial, fastest, lines

from ..forward.part_times import NoParts
from ..graphs.exchange_times import round_us
from ..loop.instruments import timed_exchange
from .decisions import full_step
from .settling import Settled

OpenBackEnd = Callable[[Blueprint], BackEnd | None]
TimeUs = Callable[[Exchange], float]


def with_back_ends(
    settled: Settled, transport: Transport, lanes: Lanes, *, ranks_here: int
) -> tuple[Settled, OpenBackEnd]:
    """What opens back ends. Ranks that are threads share a device, which they do not serve: there is nothing to try.

    ValueError for one that was asked for there.
    """
    if ranks_here > 1:
        mode = settled.config.exchange.exchange
        if mode in MAKERS:
            raise ValueError(f"exchange is {mode}, but {ranks_here} ranks are threads on one device; e.g. bounded")
        settled = replace(settled, exchange_tries=())
    return settled, opener(transport, lanes=lanes, device=settled.device, comm_sms=settled.config.left_sms)


def build_exchange(
    settled: Settled,
    transport: Transport,
    timer: NoParts,
    *,
    ops: ExchangeOps,
    back_end: OpenBackEnd | None,
    tell: Callable[[str], object],
    time_us: TimeUs | None = None,
) -> Exchange:
    """One rank's. Where there are several to try, all ranks together, each a process of its own; `tell` hears of the
    choice, its times, and what was dropped.

    time_us: of one round; None, as `exchange_times` has it, with a full step's tokens.
    """
    config, model, moe = settled.config, settled.model, settled.model.moe
    assert moe is not None, "a model without experts exchanges nothing"
    num_slots = settled.plan.slots_per_rank * config.ranks

    def build(way: ExchangeConfig) -> Exchange:
        return timed_exchange(
            transport,
            timer,
            num_slots=num_slots,
            hidden=model.hidden_size,
            top_k=moe.top_k,
            dtype=settled.dtype,
            device=settled.device,
            config=way,
            num_tracks=config.overlap.most_tracks,
            topology=settled.topology,
            plan=settled.capacities,
            ops=ops,
            back_end=back_end,
        )

    def lacks(way: ExchangeConfig) -> str | None:
        """What is missing on this machine, or the rule that this model breaks."""
        if way.exchange not in MAKERS:
            return None
        blueprint = Blueprint(
            topology=settled.topology,
            num_slots=num_slots,
            hidden=model.hidden_size,
            top_k=moe.top_k,
            dtype=settled.dtype,
            config=way,
        )
        return refusal(way.exchange, settled.device) or MAKERS[way.exchange].refuses(blueprint)

    if not settled.exchange_tries:
        return build(config.exchange)
    trial = Trial(
        configs=settled.exchange_tries,
        lacks=lacks,
        build=build,
        time_us=time_us or partial(round_us, tokens=full_step(config)),
    )
    exchange, tried = fastest(trial, transport, device=settled.device)
    for line in lines(tried):
        tell(line)
    return exchange
