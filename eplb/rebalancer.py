"""When experts move: counted, planned, moved, switched; one rank's part of what all ranks do in the same steps.

    COUNTING   until a window is full and the interval over; then all ranks gather their loads
    PLANNING   the same plan on every rank, a few layers a step, so that no step waits long for it
    MOVING     layer by layer (see `migration`); a layer switches when all ranks have voted that they hold its arrivals

Every decision is a function of what all ranks know alike: turns taken, gathered loads, votes. So a rank needs nobody's
word to be in the same stage as the others, and a fault on one of them drops the migration on all. Knows loads,
placements and votes as numbers; does not know requests, steps in flight or where weights come from.

Legend: Y the MoE layers, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

import torch
from torch import Tensor

from ep import Kind, SerriedError, Tag, Transport
from moe import ExpertPlacement

from .goal import Goal, Planner, Question
from .load import ExpertLoad, LoadWindow, balancedness
from .migration import ExpertLayer, Fault, Fetch, LayerTransfer, Pool
from .moves import CELL_BYTES, Speeds, diff, piece_cells, settle_in
from .stats import RebalanceStats

PLAN_LAYERS = 4
"""Layers planned in one step."""
STALL_TURNS = 256
"""Steps without a beat or a switch after which a migration is given up."""


class Stage(IntEnum):
    """What the group is about."""

    COUNTING = 0
    PLANNING = 1
    MOVING = 2


class Rebalancer:
    """One rank's part. `turn` is called once a step on all ranks, at the same place of their program."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        placements: Sequence[ExpertPlacement],
        *,
        load: ExpertLoad,
        planner: Planner,
        pool: Pool,
        transport: Transport,
        window: int,
        interval: int,
        min_gain: float,
        speeds: Speeds | None = None,
        node_size: int = 0,
        fetch: Fetch | None = None,
    ) -> None:
        self.placements = list(placements)
        self.stage = Stage.COUNTING
        self.epoch = 0
        self.stats = RebalanceStats()
        self._layers = layers
        self._load = load
        self._planner = planner
        self._pool = pool
        self._transport = transport
        self._interval = interval
        self._min_gain = min_gain
        self._speeds = speeds or Speeds()
        self._node_size = node_size or transport.size
        self._fetch = fetch
        self._wait = window
        self._goal: Goal | None = None
        self._transfer: LayerTransfer | None = None
        self._idle_turns = 0

    @property
    def ready(self) -> int:
        """What this rank votes: 1 + the switches it has made once all arrivals for the next are here; 0 before that;
        below 0 a Fault."""
        if self._transfer is None:
            return 0
        if self._transfer.fault is not None:
            return int(self._transfer.fault)
        return self.epoch + 1 if self._transfer.complete else 0

    def turn(self, ready: Sequence[int], *, step: int) -> str | None:
        """Do this step's share. `ready`: every rank's vote before this step. Returns a line for the log, or None: on
        rank 0, and on the rank that is to blame for a drop."""
        if self.stage is Stage.COUNTING:
            self._wait -= 1
            if self._wait <= 0:
                self._gather(step)
            return None
        assert self._goal is not None
        self._goal.turns += 1
        if self.stage is Stage.PLANNING:
            return self._plan(self._goal)
        return self._move(self._goal, ready, step)

    def _gather(self, step: int) -> None:
        """Add up all ranks' windows; without any load, wait for another interval."""
        facts = [self._node_size, self._load.num_tokens, *[layer.bank.blob_bytes for layer in self._layers]]
        counted = self._load.weighted().to_words()
        row = torch.cat([torch.tensor(facts, dtype=torch.int64, device=counted.device), counted])
        rows = self._transport.all_gather(row, tag=Tag(step, 0, 0, 0, Kind.MIGRATE)).wait().cpu()
        facts_RF, words_R = rows[:, : len(facts)], rows[:, len(facts) :]
        _check_sizes(facts_RF[:, 2:], rank=self._transport.rank, step=step)
        self._node_size = int(facts_RF[:, 0].min())
        num_layers, num_experts = self._load.counts_YE.shape
        window = LoadWindow.total(
            [LoadWindow.from_words(words, num_layers=num_layers, num_experts=num_experts) for words in words_R]
        )
        self._rest()
        if window.num_tokens:
            self.stats = replace(self.stats, balance=self._balance(window))
            tokens = int(facts_RF[:, 1].sum()) / window.num_steps / self._transport.size
            self._goal = Goal(window=window, tokens_per_rank=tokens)
            self.stage = Stage.PLANNING

    def _balance(self, window: LoadWindow) -> tuple[float, ...]:
        counts = window.counts_YE.tolist()
        return tuple(
            balancedness(counts_E, placement.slot_experts, placement.num_ranks)
            for counts_E, placement in zip(counts, self.placements, strict=True)
        )

    def _plan(self, goal: Goal) -> None:
        """The next few layers; after the last, is it worth it?"""
        part = slice(len(goal.new), min(len(goal.new) + PLAN_LAYERS, len(self._layers)))
        old = self.placements[part]
        plan = self._planner(
            Question(
                layers=part,
                counts_YE=goal.window.counts_YE[part],
                old=old,
                node_size=self._node_size,
                tokens_per_rank=goal.tokens_per_rank,
            )
        )
        goal.new += [settle_in(had, gets) for had, gets in zip(old, plan.placements, strict=True)]
        goal.before += [layer.before for layer in plan.layers]
        goal.after += [layer.after for layer in plan.layers]
        if len(goal.new) < len(self._layers):
            return
        goal.left = [
            layer
            for layer, (old, new) in enumerate(zip(self.placements, goal.new, strict=True))
            if old.slot_experts != new.slot_experts
        ]
        if goal.left and goal.gain >= self._min_gain:
            self.stage = Stage.MOVING
            self._idle_turns = 0
        else:
            self._rest()

    def _move(self, goal: Goal, ready: Sequence[int], step: int) -> str | None:
        """Switch what all ranks have; then the next beat. Or drop it all."""
        self._idle_turns += 1
        faults = [(rank, vote) for rank, vote in enumerate(ready) if vote < 0]
        if faults:
            culprit, fault = faults[0]
            if any(vote == Fault.CHECKPOINT for _, vote in faults):
                self._fetch = None  # on all ranks, whose plans of moves stay alike
            return self._drop(goal, f"rank {culprit} {Fault(fault)}", culprit)
        if self._transfer is not None and min(ready) > self.epoch:
            self._switch(goal, self._transfer)
            if not goal.left:
                return self._finish(goal)
        if self._transfer is None:
            self._transfer = self._begin(goal, goal.left[0])
        if not self._transfer.complete:
            self._beat(self._transfer, step)
        elif self._idle_turns >= STALL_TURNS:
            late = [str(rank) for rank, vote in enumerate(ready) if vote <= self.epoch]
            return self._drop(goal, f"ranks {', '.join(late)} have not got all for {STALL_TURNS} steps")
        return None

    def _beat(self, transfer: LayerTransfer, step: int) -> None:
        began = time.thread_time()
        transfer.beat(step=step)
        self._idle_turns = 0
        self.stats = replace(
            self.stats,
            beats=self.stats.beats + 1,
            most_bytes=max(self.stats.most_bytes, transfer.most_bytes),
            beat_cpu_s=self.stats.beat_cpu_s + time.thread_time() - began,
        )

    def _begin(self, goal: Goal, layer: int) -> LayerTransfer:
        blob_bytes = self._layers[layer].bank.blob_bytes
        speeds = self._speeds
        if self._fetch is None or piece_cells(blob_bytes) * CELL_BYTES > self._pool.limit:
            speeds = Speeds(ranks=speeds.ranks)
        moves = diff(
            layer,
            self.placements[layer],
            goal.new[layer],
            blob_bytes=blob_bytes,
            node_size=self._node_size,
            speeds=speeds,
        )
        return LayerTransfer(
            moves, layer=self._layers[layer], pool=self._pool, transport=self._transport, fetch=self._fetch
        )

    def _switch(self, goal: Goal, transfer: LayerTransfer) -> None:
        layer = goal.left.pop(0)
        transfer.write()
        self.placements[layer] = goal.new[layer]
        self.epoch += 1
        self._transfer = None
        self._idle_turns = 0
        goal.switched += 1
        moved = sum(transfer.moves.sender(haul) != haul.rank for haul in transfer.moves.hauls)
        goal.experts += moved
        goal.num_bytes += moved * self._layers[layer].bank.blob_bytes

    def _finish(self, goal: Goal) -> str | None:
        self._book(goal, rebalances=self.stats.rebalances + 1)
        self._rest()
        if self._transport.rank != 0:
            return None
        return (
            f"experts rebalanced in {goal.turns} steps: balance {_mean(goal.before):.2f} -> {_mean(goal.after):.2f} "
            f"expected, the slowest ranks' rows {100 * goal.gain:.0f}% fewer; {goal.experts} experts in "
            f"{goal.switched} layers moved, {goal.num_bytes / 1e6:.1f} MB"
        )

    def _drop(self, goal: Goal, cause: str, culprit: int = 0) -> str | None:
        """Who is to blame knows more than the vote tells."""
        if self._transfer is not None and self._transfer.fault is not None:
            cause = f"{cause}: {self._transfer.why}"
        self._book(goal, dropped=self.stats.dropped + 1)
        self._rest()
        if self._transport.rank not in (0, culprit):
            return None
        return (
            f"rebalance dropped after {goal.turns} steps: {cause}; {goal.switched} layers had switched, "
            f"{len(goal.left)} stay as they were"
        )

    def _book(self, goal: Goal, **counts: int) -> None:
        self.stats = replace(
            self.stats,
            experts_moved=self.stats.experts_moved + goal.experts,
            bytes_moved=self.stats.bytes_moved + goal.num_bytes,
            balance_before=tuple(goal.before),
            balance_after=tuple(goal.after),
            **counts,
        )

    def _rest(self) -> None:
        """Count for another interval."""
        self.stage = Stage.COUNTING
        self._wait = self._interval
        self._goal = self._transfer = None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _check_sizes(sizes_RY: Tensor, *, rank: int, step: int) -> None:
    """Experts move as bytes, so all ranks must keep a layer's experts in one format."""
    odd = (sizes_RY != sizes_RY[0]).nonzero().tolist()
    if odd:
        culprit, layer = odd[0]
        raise SerriedError(
            f"experts of MoE layer {layer} take {sizes_RY[culprit, layer]} bytes on rank {culprit} and "
            f"{sizes_RY[0, layer]} on rank 0: parts of the layer are stored in fp8, others are not",
            rank=rank,
            step=step,
        )
