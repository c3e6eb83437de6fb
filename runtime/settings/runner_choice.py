"""How a rank's steps are run: chosen once, at start, by `graph_plan`."""

from __future__ import annotations

from dbo import Untimed

from ..forward.batch import RequestTable
from ..forward.decoder import Decoder
from ..graphs.capturing import Captures
from ..graphs.graph_device import GRAPH_DEVICES
from ..graphs.graphs import GraphRunner
from ..graphs.runner import EagerRunner, Runner
from ..graphs.switch import Switch
from ..graphs.sync_guard import Guard
from .graph_plan import sizes_of, why_eager
from .settling import Settled


def build_runner(
    settled: Settled,
    decoder: Decoder,
    table: RequestTable,
    *,
    switch: Switch,
    timeline: Untimed,
    ranks_here: int,
    drafts: bool,
    guard: Guard,
) -> Runner:
    """One rank's; `switch` is what the decoder's attention was handed through. drafts: whether rows may have some."""
    config = settled.config
    eager = EagerRunner(decoder, table, staggered=config.overlap.dbo_order == "staggered", timeline=timeline)
    if why_eager(config, settled.model, settled.device, ranks_here=ranks_here):
        return eager
    captures = Captures(
        eager,
        decoder,
        table,
        device=GRAPH_DEVICES[settled.device.type](settled.device),
        switch=switch,
        sizes=sizes_of(config, drafts=drafts),
        most_context=decoder.cache.num_pages * decoder.cache.page_size + config.scheduler.max_num_seqs,
        guard=guard,
    )
    return GraphRunner(eager, decoder, table, captures)
