"""Steps as graphs: recorded before the first one, and replayed on static inputs.

    decode      every row computes one token      one graph for the whole step, by (tokens, tracks)
    prompts     some rank may compute some        graphs of what lies between attentions, by tokens; one track
    other       drafts, tracks with prompts, steps that are run again, sizes beyond the largest: kernel by kernel

The size is the plan's: of the fullest rank, taken to the next one that was recorded. Whether a rank replays it or runs
the step kernel by kernel is its own business, for its exchanges are the same: bounded, of the same capacities. Knows
when what is replayed; how work is recorded is `graph_device`'s.

Shapes: T tokens of the graph, B sampled positions, D model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ep import ExchangeBytes, Terms
from ep.clock import ON_DEVICE

from ..forward.batch import RequestTable, StepBatch
from ..forward.decoder import Decoder, DecoderOutput
from ..forward.tracks import cut_rows
from ..requests.rows import Rows
from ..sampling.prompt_logprobs import asks_of_prompts
from ..scheduling.heartbeat import StepPlan
from .graph_config import has_prompts, taken_to
from .graph_device import GraphDevice, Program, Recording
from .graph_inputs import StaticInputs, one_token_each, token_columns
from .runner import EagerRunner, Ran, joined
from .switch import PieceStep, Switch, SwitchMemory


class GraphKey(NamedTuple):
    """What a whole step is recorded for. `tokens` are those of a track."""

    tokens: int
    tracks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A program, its inputs, and what its exchanges put on the wire, which nobody counts in a replay."""

    inputs: StaticInputs
    program: Program[DecoderOutput]
    sent: ExchangeBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is recorded: tokens of decode steps, of pieces, and the numbers of tracks of the former."""

    decode: tuple[int, ...]
    pieces: tuple[int, ...]
    tracks: tuple[int, ...] = (1,)


class GraphRunner:
    """One rank's, see `runner.Runner`.

    switch      that the decoder's attention was handed through
    num_eager   steps that were run kernel by kernel since the start
    """

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
        level: int = 0,
    ) -> None:
        """most_context: positions of all requests of a step together that a graph has room to attend to.

        level: of the capacities that steps are recorded with; steps with others are run kernel by kernel.
        """
        self._eager = eager
        self._decoder = decoder
        self._table = table
        self._device = device
        self._switch = switch
        self._sizes = sizes
        self._most_context = most_context
        self._level = level
        self._whole: dict[GraphKey, Recorded] = {}
        self._pieces: dict[int, Recorded] = {}
        self._memory: SwitchMemory | None = None
        self.num_eager = 0

    def bucket(self, plan: StepPlan) -> int:
        """See `Runner`: where nothing was recorded for a step, as many as the plan says."""
        if has_prompts(plan):
            return taken_to(plan.track_tokens, self._sizes.pieces) if plan.tracks == 1 else plan.track_tokens
        return taken_to(plan.track_tokens, self._sizes.decode)

    def prepare(self) -> None:
        """Record everything, the largest first: what it leaves free, smaller ones use."""
        with torch.inference_mode():
            self._table.pages.on_device()
            for tokens in reversed(self._sizes.pieces):
                self._pieces[tokens] = self._record_pieces(tokens)
            for tokens in reversed(self._sizes.decode):
                for tracks in self._sizes.tracks:
                    self._whole[GraphKey(tokens, tracks)] = self._record_whole(tokens, tracks)

    def forward(self, rows: Rows, terms: Terms, plan: StepPlan) -> Ran:
        """See `Runner`."""
        if not terms.exact and terms.level == self._level:
            if not has_prompts(plan):
                recorded = self._whole.get(GraphKey(terms.bucket, plan.tracks))
                if recorded is not None and one_token_each(rows) and int(rows.end_B.sum()) <= self._most_context:
                    return self._replay_whole(recorded, rows, plan.step)
            elif plan.tracks == 1 and terms.bucket in self._pieces and not asks_of_prompts(rows):
                return self._replay_pieces(self._pieces[terms.bucket], rows, plan.step)
        self.num_eager += 1
        return self._eager.forward(rows, terms, plan)

    def _record_whole(self, tokens: int, tracks: int) -> Recorded:
        inputs = StaticInputs.room_for(tokens, tracks, self._decoder.cache.pages.device)

        def work() -> DecoderOutput:
            views = [track.view(self._table.pages, most_context=self._most_context) for track in inputs.tracks]
            wanted = [(view, view.decode.tokens_R) for view in views]
            return self._eager.drive(wanted, Terms(bucket=tokens, level=self._level), step=ON_DEVICE)

        with self._device.lane():
            work()
            before = self._decoder.sent_bytes
            program = Recording[DecoderOutput](self._device).record(work, None)
        return Recorded(inputs=inputs, program=program, sent=self._sent_since(before))

    def _record_pieces(self, tokens: int) -> Recorded:
        inputs = StaticInputs.room_for(tokens, 1, self._decoder.cache.pages.device)
        memory = self._piece_memory()
        recording: Recording[DecoderOutput] = Recording(self._device)
        nobody = StepBatch.build(Rows.of(()), self._table)

        def work() -> DecoderOutput:
            [view] = [track.view(self._table.pages, most_context=self._most_context) for track in inputs.tracks]
            terms = Terms(bucket=tokens, level=self._level)
            return self._eager.drive([(view, view.decode.tokens_R)], terms, step=ON_DEVICE)

        with self._device.lane():
            work()
            before = self._decoder.sent_bytes
            with self._switch.cutting(recording, memory):
                program = recording.record(work, PieceStep(view=nobody.view, plan=None))
        return Recorded(inputs=inputs, program=program, sent=self._sent_since(before))

    def _piece_memory(self) -> SwitchMemory:
        decoder, most_tokens = self._decoder, self._sizes.pieces[-1]
        if self._memory is None:
            device = decoder.cache.pages.device
            self._memory = SwitchMemory.room_for(most_tokens, decoder.model.mla, dtype=decoder.dtype, device=device)
        return self._memory

    def _sent_since(self, before: ExchangeBytes) -> ExchangeBytes:
        now = self._decoder.sent_bytes
        return ExchangeBytes(network=now.network - before.network, node=now.node - before.node)

    def _replay_whole(self, recorded: Recorded, rows: Rows, step: int) -> Ran:
        inputs = recorded.inputs
        parts = cut_rows(rows, len(inputs.tracks))
        inputs.write([token_columns(part, self._table) for part in parts])
        self._table.pages.on_device()
        self._decoder.replays(step, recorded.sent)
        out = recorded.program.replay(None)
        size = inputs.tracks[0].size
        real = [slice(number * size, number * size + len(part)) for number, part in enumerate(parts)]
        return Ran(
            rows=Rows.joined(parts),
            out=_taken(out, joined([out.hidden_BD[part] for part in real]), real),
            slots_B=joined([inputs.buffer[0, part] for part in real]),
            positions_B=joined([inputs.buffer[1, part] for part in real]) + 1,
        )

    def _replay_pieces(self, recorded: Recorded, rows: Rows, step: int) -> Ran:
        batch = StepBatch.build(rows, self._table)
        view = batch.view
        recorded.inputs.write_there(torch.stack([view.slots_T, view.positions_T, view.places_T]))
        self._decoder.replays(step, recorded.sent)
        out = recorded.program.replay(PieceStep(view=view, plan=self._decoder.attention_plan(view)))
        return Ran(
            rows=batch.rows,
            out=_taken(out, out.hidden_BD.index_select(0, batch.logit_rows_B), [slice(0, view.num_tokens)]),
            slots_B=batch.slots_B,
            positions_B=batch.positions_B,
        )


def _taken(out: DecoderOutput, hidden_BD: Tensor, real: list[slice]) -> DecoderOutput:
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
    )
