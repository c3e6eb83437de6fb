"""Steps as graphs: recorded before the first one, and replayed on static inputs.

    decode      rows of one token each, and drafts       one graph for the whole step, by (tokens, tracks)
    prompts     some rank may compute some               graphs of what lies between attentions, by (tokens, tracks)
    other       steps that are run again, exact, and what is larger than anything recorded: kernel by kernel, counted

The size is the plan's: of the fullest rank, taken to the next one that was recorded. Whether a rank replays it or runs
the step kernel by kernel is its own business, for its exchanges are the same: bounded, of the same capacities. Knows
when what is replayed; what is recorded is `capturing`'s, how work is recorded `graph_device`'s.

Shapes: T tokens of the graph, B sampled positions, P prompt positions that are asked for, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from ep import Terms

from ..forward.batch import RequestTable, StepBatch
from ..forward.decoder import Decoder, DecoderOutput
from ..forward.tracks import cut_rows
from ..requests.rows import Rows
from ..scheduling.heartbeat import StepPlan
from .capturing import Captured, Captures
from .graph_config import GraphKey, has_prompts, taken_to
from .graph_inputs import track_columns
from .runner import EagerRunner, Ran, RunTally, joined
from .switch import PieceStep


class WhyEager(StrEnum):
    """Why a step is launched kernel by kernel where others are replayed. The first three are alike on all ranks."""

    EXACT = "run again exactly"
    LARGE = "larger than any captured"
    OLD = "of capacities before they were raised"
    DRAFTS = "more drafts a row than captured"
    CONTEXT = "more context than captured"


class GraphRunner:
    """One rank's, see `runner.Runner`."""

    def __init__(self, eager: EagerRunner, decoder: Decoder, table: RequestTable, captures: Captures) -> None:
        self._eager = eager
        self._decoder = decoder
        self._table = table
        self._captures = captures
        self.tally = RunTally()

    def bucket(self, plan: StepPlan) -> int:
        """See `Runner`: where nothing was recorded for a step, as many as the plan says."""
        sizes = self._captures.sizes.of(whole=not has_prompts(plan), tracks=plan.tracks)
        return taken_to(plan.track_tokens, sizes)

    def prepare(self) -> None:
        """See `Runner`."""
        self._captures.prepare()

    def forward(self, rows: Rows, terms: Terms, plan: StepPlan) -> Ran:
        """See `Runner`."""
        key = GraphKey(not has_prompts(plan), terms.bucket, plan.tracks)
        why = self._why_nobody(key, terms)
        if why is None:  # and so it is on all ranks, which may have to record it now
            captured = self._captures.find(key, terms.level)
            why = self._why_not(rows) if key.whole else None
            if why is None:
                self.tally.replayed += 1
                return self._replay_whole(captured, rows, plan) if key.whole else self._replay(captured, rows, plan)
        self.tally.launched[why] += 1
        return self._eager.forward(rows, terms, plan)

    def _why_nobody(self, key: GraphKey, terms: Terms) -> WhyEager | None:
        """Why no rank can replay this step."""
        if terms.exact:
            return WhyEager.EXACT
        if key.tokens not in self._captures.sizes.of(whole=key.whole, tracks=key.tracks):
            return WhyEager.LARGE
        return WhyEager.OLD if terms.level < self._captures.level else None

    def _why_not(self, rows: Rows) -> WhyEager | None:
        """Why this rank cannot replay these rows as a whole step."""
        if int(rows.num_tokens_B.max(initial=0)) > self._captures.sizes.row_tokens:
            return WhyEager.DRAFTS
        return WhyEager.CONTEXT if int(rows.end_B.sum()) > self._captures.most_context else None

    def _replay_whole(self, captured: Captured, rows: Rows, plan: StepPlan) -> Ran:
        """Every token of such a step is sampled after."""
        inputs = captured.inputs
        parts = cut_rows(rows, len(inputs.tracks))
        inputs.write([track_columns(part, self._table) for part in parts])
        self._table.pages.on_device()
        self._decoder.replays(plan.step, captured.sent)
        out = captured.program.replay(None)
        real = _real(inputs.tracks[0].size, [part.num_tokens for part in parts])
        return Ran(
            rows=Rows.joined(parts),
            out=_taken(out, real, hidden_BD=joined([out.hidden_BD[part] for part in real])),
            slots_B=joined([inputs.buffer[0, part] for part in real]),
            positions_B=joined([inputs.buffer[1, part] for part in real]) + 1,
        )

    def _replay(self, captured: Captured, rows: Rows, plan: StepPlan) -> Ran:
        """Pieces, and attention between them."""
        tracks = captured.inputs.tracks
        batches = [StepBatch.build(part, self._table) for part in cut_rows(rows, len(tracks))]
        views = [batch.view for batch in batches]
        for track, view in zip(tracks, views, strict=True):
            track.write_tokens(torch.stack([view.slots_T, view.positions_T, view.places_T]))
        self._decoder.replays(plan.step, captured.sent)
        plans = [self._decoder.attention_plan(view) for view in views]
        out = captured.program.replay(PieceStep(number=plan.step, views=views, plans=plans))
        real = _real(tracks[0].size, [view.num_tokens for view in views])
        asked = [
            batch.prompt_rows_P + part.start
            for batch, part in zip(batches, real, strict=True)
            if batch.prompt_rows_P is not None
        ]
        logit_rows_B = joined([batch.logit_rows_B + part.start for batch, part in zip(batches, real, strict=True)])
        return Ran(
            rows=Rows.joined([batch.rows for batch in batches]),
            out=_taken(
                out,
                real,
                hidden_BD=out.hidden_BD.index_select(0, logit_rows_B),
                prompt_PD=out.hidden_BD.index_select(0, joined(asked)) if asked else None,
            ),
            slots_B=joined([batch.slots_B for batch in batches]),
            positions_B=joined([batch.positions_B for batch in batches]),
            prompts=[part for batch in batches for part in batch.prompts],
        )


def _real(size: int, num_tokens: Sequence[int]) -> list[slice]:
    """Where among the padded tokens of all tracks the real ones of each are."""
    return [slice(number * size, number * size + real) for number, real in enumerate(num_tokens)]


def _taken(
    out: DecoderOutput, real: Sequence[slice], *, hidden_BD: Tensor, prompt_PD: Tensor | None = None
) -> DecoderOutput:
    """What a replay left, as its own: the next one writes over it. `real` are the tokens that are no padding.

    Hidden states are read by what is launched next, before that.
    """
    experts_LTK = None
    if out.experts_LTK is not None:
        experts_LTK = torch.cat([out.experts_LTK[:, part] for part in real], dim=1)
    return DecoderOutput(
        hidden_BD=hidden_BD,
        counts_LE=out.counts_LE.clone(),
        num_pairs=out.num_pairs.clone() if isinstance(out.num_pairs, Tensor) else out.num_pairs,
        overflow=None if out.overflow is None else out.overflow.clone(),
        experts_LTK=experts_LTK,
        fault=None if out.fault is None else out.fault.clone(),
        prompt_PD=prompt_PD,
    )
