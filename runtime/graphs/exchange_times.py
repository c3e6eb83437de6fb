"""What a dispatch and combine take on a device, as a step makes them: replayed from a graph where there are graphs.

    CUDA    recorded once, replayed between two events; the host's time is not in it
    CPU     called again and again, between two looks at the clock

Knows an exchange and a device; not which exchanges there are.

Legend: T tokens here, D model, K top-k, N rows received, M pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ep import Exchange, Kind, PairRows, Tag, Terms, wide

from .graph_device import GRAPH_DEVICES, Recording

WARM, REPEATS = 3, 20


def round_us(exchange: Exchange, *, tokens: int) -> float:
    """Microseconds of one round of `tokens` random tokens on every rank. All ranks call it together.

    One row comes back for every pair, whatever landed: no expert's time is in it.
    """
    device = torch.device(exchange.device)
    work = partial(_straight_back, exchange, *_inputs(exchange, tokens))
    with torch.inference_mode():
        return CLOCKS[device.type](work, device)


def _inputs(exchange: Exchange, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(exchange.rank)
    x_TD = torch.randn(tokens, exchange.hidden, generator=generator).to(exchange.dtype)
    num_slots = exchange.num_ranks * exchange.slots_per_rank
    slots_TK = torch.rand(tokens, num_slots, generator=generator).topk(min(exchange.top_k, num_slots), dim=1).indices
    slots_TK = slots_TK[:, torch.arange(exchange.top_k) % slots_TK.shape[1]]
    weights_TK = torch.rand(tokens, exchange.top_k, generator=generator).to(wide(exchange.dtype))
    return x_TD.to(exchange.device), slots_TK.to(exchange.device), weights_TK.to(exchange.device)


def _straight_back(exchange: Exchange, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
    tag, terms = Tag(0, 0, 0, 0, Kind.CHECK), Terms(bucket=x_TD.shape[0])
    arrivals = exchange.dispatch(x_TD, slots_TK, weights_TK, tag=tag, terms=terms).wait()
    pairs = PairRows(x_TD[:1], torch.where(arrivals.slots_NK >= 0, 0, -1))
    return exchange.combine(pairs, arrivals, tag=tag).wait()


def _replayed_us(work: Callable[[], Tensor], device: torch.device) -> float:
    graphs = GRAPH_DEVICES[device.type](device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with graphs.lane():
        work()
        program = Recording(graphs).record(work, None)
        for _ in range(WARM):
            program.replay(None)
        begin.record()
        for _ in range(REPEATS):
            program.replay(None)
        end.record()
    return begin.elapsed_time(end) * 1e3 / REPEATS


def _called_us(work: Callable[[], Tensor], _device: torch.device) -> float:
    for _ in range(WARM):
        work()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    return (time.perf_counter() - began) * 1e6 / REPEATS


CLOCKS: dict[str, Callable[[Callable[[], Tensor], torch.device], float]] = {"cuda": _replayed_us, "cpu": _called_us}
