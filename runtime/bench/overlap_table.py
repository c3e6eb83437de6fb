"""What two tracks gain a group that decodes, over ranks, batches and contexts, and whether `auto` would cut the step.

The times are the cost model's; the choice is the heartbeat's own, after as many equal steps as it takes to make up its
mind. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dbo.policy import PATIENCE, Choice, DboConfig, OverlapState

from ..costs.cost_tables import CostTables
from ..costs.costs import StepCosts, StepShape
from ..costs.measured import MeasuredOperations
from ..costs.traffic import RowsPer
from ..scheduling.cadence import CadenceConfig
from ..scheduling.heartbeat import HeartbeatState, Vote, decide
from ..scheduling.overlap import CostModel

RANKS = (8, 16, 32, 64)
TOKENS = (32, 64, 128, 256)
CONTEXTS = (2048, 4096)
_STEPS = 4 * PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A group in which every rank decodes `tokens` requests of `context_len`; milliseconds a step."""

    ranks: int
    tokens: int
    context_len: int
    one_ms: float
    cut_ms: float
    choice: Choice

    @property
    def gain(self) -> float:
        """Throughput of cut steps over whole ones, less 1."""
        return self.one_ms / self.cut_ms - 1.0

    @property
    def is_cut(self) -> bool:
        """What auto does."""
        return self.choice is Choice.CUT


def overlap_cells(
    tables: CostTables,
    config: DboConfig,
    *,
    comm_share: float,
    rows_per: RowsPer,
    ranks: Sequence[int] = RANKS,
) -> list[Cell]:
    """Every cell of the table; `config` says all but `dbo`, which is auto."""
    cells = []
    for size in ranks:
        operations = MeasuredOperations(tables=tables, ranks=size, rows_per=rows_per)
        costs = StepCosts(operations, comm_share=comm_share)
        cells += [_cell(costs, config, size, tokens, context) for tokens in TOKENS for context in CONTEXTS]
    return cells


def _cell(costs: StepCosts, config: DboConfig, ranks: int, tokens: int, context_len: int) -> Cell:
    shape = StepShape(decode_tokens=tokens, context_len=context_len)
    times = {tracks: costs.step_time([shape], tracks=tracks) for tracks in (1, config.dbo_tracks)}
    overlap = OverlapState(config=replace(config, dbo="auto"), model=CostModel(costs=costs))
    state = HeartbeatState.start(CadenceConfig(), overlap=overlap)
    vote = Vote(
        sequence=0,
        epoch=0,
        config_hash=0,
        decode_tokens=tokens,
        unfinished=tokens,
        context_tokens=tokens * context_len,
        decode_row=1,
    )
    plan, state = decide([vote] * ranks, state)
    for number in range(1, _STEPS):
        took = times[plan.tracks]
        exchange_us = round(took.exchange_us)
        vote = vote._replace(sequence=number, compute_us=round(took.total_us) - exchange_us, exchange_us=exchange_us)
        plan, state = decide([vote] * ranks, state)
    one_us, cut_us = [times[tracks].total_us for tracks in (1, config.dbo_tracks)]
    return Cell(
        ranks=ranks,
        tokens=tokens,
        context_len=context_len,
        one_ms=one_us / 1e3,
        cut_ms=cut_us / 1e3,
        choice=plan.overlap,
    )
