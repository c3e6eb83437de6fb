"""How a step's layers are put on the device: kernel by kernel (`EagerRunner`), or as graphs (`graphs`).

Chosen once, at start. Knows rows, tracks and terms; what is sampled of what they leave is the launcher's.

Shapes: T tokens here, B sampled positions, D model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from attention_mla import PagedView
from dbo import UNTIMED, Untimed, drive
from ep import Terms

from ..forward.batch import RequestTable, StepBatch
from ..forward.decoder import Decoder, DecoderOutput, TrackInput
from ..forward.tracks import cut_rows, join_outputs
from ..requests.rows import Rows
from ..sampling.prompt_logprobs import PromptPart
from ..scheduling.heartbeat import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What the layers left behind.

    rows                   in the order in which they are sampled
    slots_B, positions_B   where in the table the sampled tokens go
    prompts                what is asked of prompts, in the order of out.prompt_PD
    """

    rows: Rows
    out: DecoderOutput
    slots_B: Tensor
    positions_B: Tensor
    prompts: Sequence[PromptPart] = ()


@dataclass(slots=True)
class RunTally:
    """How one rank's steps were run since the start, where some can be replayed; nothing where none can."""

    replayed: int = 0
    launched: Counter[str] = field(default_factory=Counter)
    """Kernel by kernel, by reason."""

    @property
    def words(self) -> str:
        """How many were launched kernel by kernel, by reason, the most frequent first."""
        return ", ".join([f"{count} {why}" for why, count in self.launched.most_common()])


class Runner(Protocol):
    """One rank's."""

    tally: RunTally

    def bucket(self, plan: StepPlan) -> int:
        """Tokens that the exchanges of a step are sized for: at least the plan's. The same on all ranks."""
        ...

    def prepare(self) -> None:
        """Before the first step, on all ranks at the same time."""
        ...

    def forward(self, rows: Rows, terms: Terms, plan: StepPlan) -> Ran:
        """The layers over all rows, in as many tracks as the plan says."""
        ...


class EagerRunner:
    """Every kernel by itself. `staggered`: tracks are a stage apart."""

    def __init__(
        self, decoder: Decoder, table: RequestTable, *, staggered: bool = False, timeline: Untimed = UNTIMED
    ) -> None:
        self._decoder = decoder
        self._table = table
        self._staggered = staggered
        self._timeline = timeline
        self.tally = RunTally()

    def bucket(self, plan: StepPlan) -> int:
        """As many as the plan says."""
        return plan.track_tokens

    def prepare(self) -> None:
        """Nothing has to be prepared."""

    def forward(self, rows: Rows, terms: Terms, plan: StepPlan) -> Ran:
        """See `Runner`."""
        batches = [StepBatch.build(part, self._table) for part in cut_rows(rows, plan.tracks)]
        out = self.drive(
            [(batch.view, batch.logit_rows_B) for batch in batches],
            terms,
            step=plan.step,
            prompt_rows=[batch.prompt_rows_P for batch in batches],
        )
        return Ran(
            rows=Rows.joined([batch.rows for batch in batches]),
            out=out,
            slots_B=joined([batch.slots_B for batch in batches]),
            positions_B=joined([batch.positions_B for batch in batches]),
            prompts=[part for batch in batches for part in batch.prompts],
        )

    def drive(
        self,
        tracks: Sequence[tuple[PagedView, Tensor]],
        terms: Terms,
        *,
        step: int,
        prompt_rows: Sequence[Tensor | None] | None = None,
    ) -> DecoderOutput:
        """The layers over tracks, each a view and the tokens (int64 indices) whose hidden states are wanted.

        prompt_rows: each track's tokens that are wanted for their prompts' log-probabilities; None, of no track.
        """
        cut = len(tracks) > 1
        stages = [
            self._decoder.stages(
                TrackInput(
                    tokens_T=self._table.tokens[view.slots_T, view.positions_T],
                    view=view,
                    logit_rows_B=logit_rows_B,
                    step=step,
                    track=track,
                    terms=terms,
                    halves=self._staggered and cut,
                    cut=cut,
                    prompt_rows_P=asked_P,
                )
            )
            for track, ((view, logit_rows_B), asked_P) in enumerate(
                zip(tracks, prompt_rows or [None] * len(tracks), strict=True)
            )
        ]
        return join_outputs(drive(stages, lead=int(self._staggered and cut), timeline=self._timeline))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
