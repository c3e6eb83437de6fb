"""A rank's experts as its step loop sees them: counted, recorded, and moved, where anybody wants that.

Knows what follows from a step that is over; when and how experts move is `eplb`'s.

Shapes: T tokens of a step, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eplb import ExpertLoad, rank_loads
from eplb.rebalancer import Rebalancer
from eplb.recording import RoutingRecorder
from eplb.stats import RebalanceStats
from moe import ExpertPlacement


class Experts:
    """`placements` by MoE layer, at the start; without a rebalancer they stay."""

    def __init__(
        self,
        load: ExpertLoad,
        *,
        placements: Sequence[ExpertPlacement] = (),
        rebalancer: Rebalancer | None = None,
        recording: RoutingRecorder | None = None,
    ) -> None:
        self.load = load
        self.rebalancer = rebalancer
        self._start = placements
        self._recording = recording

    def count(self, counts_LE: Tensor, *, num_tokens: int, experts_LTK: Tensor | None = None) -> None:
        """A step of this rank that is over; a model without MoE layers counts nothing.

        experts_LTK: of its tokens one by one, where that is recorded; see `decoder.DecoderOutput`.
        """
        if not counts_LE.shape[0]:
            return
        self.load.add(counts_LE, num_tokens=num_tokens)
        if self._recording is not None:
            self._recording.add(counts_LE, num_tokens=num_tokens)
            if experts_LTK is not None:
                self._recording.add_experts(experts_LTK)

    @property
    def epoch(self) -> int:
        """Grows with every switch; ranks agree on it before a step."""
        return self.rebalancer.epoch if self.rebalancer is not None else 0

    @property
    def ready(self) -> int:
        """What this rank votes on the experts that are on their way to it (see `eplb.rebalancer`)."""
        return self.rebalancer.ready if self.rebalancer is not None else 0

    def turn(self, ready: Sequence[int], *, step: int) -> str | None:
        """A step's share of moving experts, after its own work: the next launch finds what it leaves.

        `ready`: all ranks' votes before the step. Returns a line that this rank is to say, or None.
        """
        return self.rebalancer.turn(ready, step=step) if self.rebalancer is not None else None

    @property
    def placements(self) -> Sequence[ExpertPlacement]:
        """Where experts sit now, by MoE layer."""
        return self.rebalancer.placements if self.rebalancer is not None else self._start

    @property
    def stats(self) -> RebalanceStats:
        """What has moved so far."""
        return self.rebalancer.stats if self.rebalancer is not None else RebalanceStats()

    def balance(self) -> float:
        """Mean over max of what this rank's tokens bring to each rank's experts, all layers together; 1.0 without."""
        counts = self.load.counts_YE.tolist() if self.placements else []
        landed = [
            rank_loads(counts_E, placement.slot_experts, placement.num_ranks)
            for counts_E, placement in zip(counts, self.placements, strict=True)
        ]
        totals = [sum(of_rank) for of_rank in zip(*landed, strict=True)]
        return sum(totals) / len(totals) / max(totals) if any(totals) else 1.0

    def close(self) -> None:
        """No step follows: what was recorded is written. Raises OSError when it cannot be."""
        if self._recording is not None:
            self._recording.close()
