"""What of one rank's steps is recorded: whole steps and pieces, by size and tracks, and the memory that they share.

All is recorded at the start, the largest first: what it leaves free, smaller ones use. When the exchange's capacities
are raised, which the plan says on all ranks alike, all of it is forgotten, and each size is recorded anew in the first
step that needs it: that step is slow, and takes memory. Knows what is recorded; which step replays what is `graphs`'.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ep import ExchangeBytes, Terms
from ep.clock import ON_DEVICE

from ..forward.batch import RequestTable, StepBatch
from ..forward.decoder import Decoder, DecoderOutput
from ..requests.rows import Rows
from .graph_config import GraphKey, Sizes
from .graph_device import GraphDevice, Program, Recording
from .graph_inputs import StaticInputs
from .runner import EagerRunner
from .switch import PieceStep, Switch, SwitchMemory
from .sync_guard import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A program, its inputs, and what its exchanges put on the wire, which nobody counts in a replay."""

    inputs: StaticInputs
    program: Program[DecoderOutput]
    sent: ExchangeBytes


class Captures:
    """One rank's. `level`: of the capacities that what is here was recorded with."""

    def __init__(
        self,
        eager: EagerRunner,
        decoder: Decoder,
        table: RequestTable,
        *,
        device: GraphDevice,
        switch: Switch,
        sizes: Sizes,
        most_context: int,
        guard: Guard,
        level: int = 0,
    ) -> None:
        """most_context: positions of all rows of a step together that a graph has room to attend to.

        level: of the capacities that it begins with. guard: is told where a step takes memory for a good reason.
        """
        self._eager = eager
        self._decoder = decoder
        self._table = table
        self._device = device
        self._switch = switch
        self._guard = guard
        self._captured: dict[GraphKey, Captured] = {}
        self._memory: SwitchMemory | None = None
        self.sizes = sizes
        self.most_context = most_context
        self.level = level

    def prepare(self) -> None:
        """Record everything; on all ranks at the same time."""
        with torch.inference_mode():
            self._table.pages.on_device()
            for key in self.sizes.each():
                self._captured[key] = self._record(key)

    def find(self, key: GraphKey, level: int) -> Captured:
        """What is recorded, or recorded now, which all ranks do in the same step: `key` and `level` are the plan's."""
        assert level >= self.level, f"level {level} after {self.level}"
        if level == self.level and key in self._captured:
            return self._captured[key]
        with self._guard.excused():
            if level > self.level:
                with self._device.lane():  # after which none of them runs any more
                    self._captured.clear()
                self.level = level
            self._captured[key] = self._record(key)
        return self._captured[key]

    def _record(self, key: GraphKey) -> Captured:
        pages, sizes, terms = self._table.pages, self.sizes, Terms(bucket=key.tokens, level=self.level)
        inputs = StaticInputs.room_for(key.tokens, key.tracks, self._decoder.cache.pages.device)
        row_tokens = sizes.row_tokens if key.whole else 1

        def work() -> DecoderOutput:
            views = [
                track.view(pages, most_context=self.most_context, row_tokens=row_tokens) for track in inputs.tracks
            ]
            return self._eager.drive([(view, view.decode.tokens_R) for view in views], terms, step=ON_DEVICE)

        recording: Recording[DecoderOutput] = Recording(self._device)
        step = None if key.whole else self._nobody(key.tracks)
        cutting = nullcontext() if key.whole else self._cutting(recording, key.tracks)
        with self._device.lane(), cutting:
            self._decoder.uncounted(lambda: recording.rehearse(work, step))
            program, sent = self._decoder.uncounted(lambda: recording.record(work, step))
        return Captured(inputs=inputs, program=program, sent=sent)

    def _cutting(self, recording: Recording[DecoderOutput], tracks: int) -> AbstractContextManager[None]:
        return self._switch.cutting(recording, self._piece_memory(), exchanges=tracks > 1)

    def _nobody(self, tracks: int) -> PieceStep:
        batch = StepBatch.build(Rows.of(()), self._table)
        return PieceStep(number=ON_DEVICE, views=[batch.view] * tracks, plans=[None] * tracks)

    def _piece_memory(self) -> SwitchMemory:
        decoder = self._decoder
        if self._memory is None:
            self._memory = SwitchMemory.room_for(
                self.sizes.largest_piece, decoder.model.mla, dtype=decoder.dtype, device=decoder.cache.pages.device
            )
        return self._memory
