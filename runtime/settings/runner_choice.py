"""Whether a rank's steps are captured, and which: chosen once, at start.

Knows what a graph needs: a device that records, kernels that ask the host nothing, and exchanges whose sizes follow
from the plan. Where it is not there, steps are launched kernel by kernel.
"""

from __future__ import annotations

import torch

from dbo import Untimed

from ..forward.batch import RequestTable
from ..forward.decoder import Decoder
from ..graphs.graph_config import piece_sizes
from ..graphs.graph_device import GRAPH_DEVICES
from ..graphs.graphs import GraphRunner, Sizes
from ..graphs.runner import EagerRunner, Runner
from ..graphs.switch import Switch, SwitchMemory
from .config import EngineConfig
from .settling import Settled


def why_eager(settled: Settled, *, ranks_here: int) -> str:
    """What keeps steps from being captured; empty where they are."""
    config = settled.config
    if settled.device.type not in GRAPH_DEVICES:
        return f"a {settled.device.type} has no graphs"
    if config.graphs.enforce_eager:
        return "--enforce-eager"
    if config.ops != "triton":
        return f"ops are {config.ops}, which ask the host"
    if settled.model.moe is not None and config.exchange.exchange != "bounded":
        return f"the exchange is {config.exchange.exchange}, which asks the host"
    if ranks_here > 1:
        return f"{ranks_here} ranks are threads of one process, which take turns inside a step"
    return ""


def build_runner(
    settled: Settled, decoder: Decoder, table: RequestTable, *, switch: Switch, timeline: Untimed, ranks_here: int
) -> Runner:
    """One rank's; `switch` is what the decoder's attention was handed through."""
    config = settled.config
    eager = EagerRunner(decoder, table, staggered=config.overlap.dbo_order == "staggered", timeline=timeline)
    if why_eager(settled, ranks_here=ranks_here):
        return eager
    return GraphRunner(
        eager,
        decoder,
        table,
        device=GRAPH_DEVICES[settled.device.type](settled.device),
        switch=switch,
        sizes=sizes_of(config),
        most_context=decoder.cache.num_pages * decoder.cache.page_size + config.scheduler.max_num_seqs,
    )


def sizes_of(config: EngineConfig) -> Sizes:
    """What is recorded for a rank of this configuration."""
    scheduler = config.scheduler
    return Sizes(
        decode=config.graphs.decode_sizes(scheduler.max_num_seqs),
        pieces=piece_sizes(scheduler.max_num_batched_tokens),
        tracks=tuple(sorted({1, config.overlap.most_tracks})),
    )


def switch_bytes(settled: Settled) -> int:
    """Static memory between pieces, see `switch`; 0 where nothing is captured."""
    sizes = sizes_of(settled.config)
    if why_eager(settled, ranks_here=1) or not sizes.pieces:
        return 0
    dtype: torch.dtype = settled.dtype
    return SwitchMemory.num_bytes(sizes.pieces[-1], settled.model.mla, dtype)
