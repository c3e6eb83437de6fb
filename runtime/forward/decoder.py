"""The model as one generator: token ids in, what the asked rows' logits follow from out, a `yield` wherever another
rank must answer.

Knows weights, the latent cache and the MoE layers; does not know requests, sampling or how many tracks are driven.

Shapes: T tokens here, B rows that get logits, D model, V vocabulary, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from attention_mla import (
    AttentionOps,
    LatentCache,
    PagedView,
    Rotation,
    Rows,
    angles,
    attention_ops,
    core,
    plain,
    project,
)
from ep import Exchange, ExchangeBytes, Pending, Terms
from ep.cpu.threads import kernel_threads
from ep.selftest import self_test
from moe import MoeLayer, MoeOps, PlacementTable, moe_ops

from ..model.model_config import ModelConfig
from ..weights.weights import DecoderWeights, LayerWeights
from .head import head_of
from .part_times import NO_PARTS, NoParts, Part

X = TypeVar("X")
Through = Callable[[str, Any], Any]
"""What is told (name, ops) of a room and returns them, or others in their place: for whoever times or cuts a step."""


def as_they_are(_name: str, ops: Any) -> Any:
    """The usual `Through`."""
    return ops


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackInput:
    """One micro-batch of one step.

    tokens_T        int64 token ids
    view            where the tokens' latents go and what they attend to
    logit_rows_B    int64 indices into T of the tokens whose next token is wanted
    step, track     the tag of every exchange
    terms           what all ranks agreed on for its exchanges
    halves          whether others may run between the halves of attention
    cut             whether other tracks' rows travel while this one computes
    prompt_rows_P   int64 indices into T of the tokens whose next one, of the prompt, is to be looked up; None: of none
    """

    tokens_T: Tensor
    view: PagedView
    logit_rows_B: Tensor
    step: int
    track: int
    terms: Terms
    halves: bool = False
    cut: bool = False
    prompt_rows_P: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOutput:
    """What a step leaves behind.

    hidden_BD   the last layer's output where logits are wanted: what `Decoder.logits` takes
    counts_LE   int64: this rank's tokens routed to each expert, one row per MoE layer
    num_pairs   (token, expert) pairs that this rank's own experts computed, all layers together; on the device where
                only it knows
    overflow    bool scalar, on the device: rows of this rank did not fit the exchange; None where all rows always do
    experts_LTK int64 experts of each token, -1 for a padded row; None where nobody asked for them
    fault       bool scalar, on the device: a rank was elsewhere in the program in this step or before; None where the
                exchange would have raised
    prompt_PD   as hidden_BD, for `TrackInput.prompt_rows_P`
    """

    hidden_BD: Tensor
    counts_LE: Tensor
    num_pairs: int | Tensor = 0
    overflow: Tensor | None = None
    experts_LTK: Tensor | None = None
    fault: Tensor | None = None
    prompt_PD: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computers:
    """What computes a step's layers."""

    attention: AttentionOps
    moe: MoeOps
    moe_layers: Mapping[int, MoeLayer]


class Decoder:
    """One rank's model over its own latent cache.

    `weights` hold this rank's experts only; `exchange` reaches the others; `tables` say, by layer, where every expert
    sits. `tell_experts`: whether outputs say which experts each token visits. `comm_sms`: multiprocessors that kernels
    leave to exchanges where tracks take turns. Ops are handed `through` before use. `parts` is told where time goes.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: DecoderWeights,
        *,
        cache: LatentCache,
        exchange: Exchange | None,
        tables: Mapping[int, PlacementTable],
        rank: int,
        ops: str = "reference",
        tell_experts: bool = False,
        comm_sms: int = 0,
        parts: NoParts = NO_PARTS,
        through: Through = as_they_are,
    ) -> None:
        self.model = model
        self.weights = weights
        self.cache = cache
        self.dtype = weights.embed_VD.dtype
        self._exchange = exchange
        self._sent = ExchangeBytes(0, 0)
        self._tell_experts = tell_experts
        self._parts = parts
        self._through = through
        self.tables = tables
        self._ops = ops
        self._head = head_of(ops, weights.head_VD)
        self._alone = self._computers(ops, rank=rank, comm_sms=0)
        self._beside_rows = self._computers(ops, rank=rank, comm_sms=comm_sms) if comm_sms else self._alone

    def _computers(self, ops: str, *, rank: int, comm_sms: int) -> _Computers:
        attention = self._through("attention", attention_ops(ops, comm_sms=comm_sms))
        moe = self._through("moe", moe_ops(ops, comm_sms=comm_sms))
        model, exchange = self.model, self._exchange
        layers = {
            index: MoeLayer(model.moe, layer.moe, exchange=exchange, table=self.tables[index], rank=rank, ops=moe)
            for index, layer in enumerate(self.weights.layers)
            if layer.moe is not None and model.moe is not None and exchange is not None
        }
        return _Computers(attention=attention, moe=moe, moe_layers=layers)

    @property
    def may_overflow(self) -> bool:
        """Whether rows may not fit the exchange, so that a step must be known to be clean before it counts."""
        return self._exchange is not None and self._exchange.may_overflow

    @property
    def sent_bytes(self) -> ExchangeBytes:
        """What this rank's exchange has put on the wire since the start."""
        if self._exchange is not None:
            now = self._exchange.take_bytes()
            self._sent = ExchangeBytes(self._sent.network + now.network, self._sent.node + now.node)
        return self._sent

    def uncounted(self, work: Callable[[], X]) -> tuple[X, ExchangeBytes]:
        """Do what is no step: its value, and what it put on the wire, which `sent_bytes` leaves out."""
        before = self.sent_bytes
        value = work()
        now, self._sent = self.sent_bytes, before
        return value, ExchangeBytes(network=now.network - before.network, node=now.node - before.node)

    def self_test(self) -> None:
        """All ranks together, before the first step: whether rows find their slots and come back. See `ep.selftest`."""
        if self._exchange is not None:
            self_test(self._exchange)

    def check_faults(self) -> None:
        """Raise TagMismatch if a rank was elsewhere in the program, as a step's `fault` says; the host waits."""
        if self._exchange is not None:
            self._exchange.check_faults()

    def stages(self, batch: TrackInput) -> Generator[Pending[Any] | None, Any, DecoderOutput]:
        """Run the layers over one micro-batch; a rank with no tokens runs them as well, with T = 0."""
        by = self._beside_rows if batch.cut else self._alone
        self._parts.enter(Part.ATTENTION)
        x_TD, update_TD = self.weights.embed_VD[batch.tokens_T], None
        last = int(batch.view.tokens.positions_T.max(initial=0)) if self._ops == "numba" else None
        mla, positions_T = self.model.mla, batch.view.positions_T
        rotation = angles(mla.rope, mla.qk_rope_head_dim, positions_T, self.dtype, last=last)
        plan = by.attention.plan(batch.view, config=self.model.mla, dtype=self.dtype)
        counts, chosen = [], []
        num_pairs = 0
        for index, layer in enumerate(self.weights.layers):
            down_XD, eps = layer.attention.down_XD, self.model.rms_norm_eps
            x_TD, h = by.attention.add_norm(x_TD, update_TD, layer.input_norm_D, eps, before=down_XD)
            attended_TD = yield from self._attention(h, layer, index, batch, rotation, plan, by.attention)
            x_TD, h = by.attention.add_norm(x_TD, attended_TD, layer.post_norm_D, eps)
            h_TD = plain(h)
            self._parts.enter(Part.EXPERTS)
            if layer.dense is not None:
                update_TD = by.moe.mlp(h_TD, layer.dense)
                self._parts.enter(Part.ATTENTION)
                continue
            out = yield from by.moe_layers[index].stages(
                h_TD,
                step=batch.step,
                layer=index,
                track=batch.track,
                terms=batch.terms,
                positions_T=batch.view.positions_T,
            )
            update_TD = out.out_TD
            counts.append(out.counts_E)
            if self._tell_experts:
                chosen.append(out.experts_TK)
            num_pairs += out.num_pairs
            self._parts.enter(Part.ATTENTION)
        experts = self.model.moe.num_experts if self.model.moe is not None else 0
        counts_LE = torch.stack(counts) if counts else torch.zeros(0, experts, dtype=torch.int64)
        overflow = self._exchange.take_overflow() if self._exchange is not None else None
        asked_P = batch.prompt_rows_P
        return DecoderOutput(
            hidden_BD=_rows_at(x_TD, update_TD, batch.logit_rows_B),
            counts_LE=counts_LE,
            num_pairs=num_pairs,
            overflow=overflow,
            experts_LTK=torch.stack(chosen) if chosen else None,
            fault=self._exchange.fault() if self._exchange is not None else None,
            prompt_PD=None if asked_P is None else _rows_at(x_TD, update_TD, asked_P),
        )

    def _attention(
        self,
        h_TD: Rows,
        layer: LayerWeights,
        index: int,
        batch: TrackInput,
        rotation: Rotation,
        plan: Any,
        ops: AttentionOps,
    ) -> Generator[None, None, Tensor]:
        config, view, cache = self.model.mla, batch.view, self.cache
        queries = project(
            h_TD, layer.attention, config=config, cache=cache, layer=index, view=view, rotation=rotation, ops=ops
        )
        if batch.halves:
            yield
        return core(queries, layer.attention, config=config, cache=cache, layer=index, view=view, ops=ops, plan=plan)

    def replays(self, step: int, sent: ExchangeBytes) -> None:
        """Before a replay: which step it is, for the tags of its exchanges, and what they will put on the wire."""
        if self._exchange is not None:
            self._exchange.set_step(step)
            self._sent = ExchangeBytes(self._sent.network + sent.network, self._sent.node + sent.node)

    def attention_plan(self, view: PagedView) -> Any:
        """What all layers share of a step whose attention is called one by one (see `switch`)."""
        return self._alone.attention.plan(view, config=self.model.mla, dtype=self.dtype)

    def logits(self, x_BD: Tensor) -> Tensor:
        """[B, V] in the head's dtype. Rows of all tracks at once, so that the head is read once a step."""
        return self._head(plain(self._alone.attention.norm(x_BD, self.weights.norm_D, self.model.rms_norm_eps)))

    def threads(self) -> AbstractContextManager[None]:
        """Around a Python thread's steps: torch's threads are left to kernels that have their own."""
        return kernel_threads() if self._ops == "numba" else nullcontext()


def _rows_at(x_TD: Tensor, update_TD: Tensor | None, rows_B: Tensor) -> Tensor:
    """The hidden states of some tokens, with what the last layer still has to add to them."""
    return x_TD[rows_B] if update_TD is None else x_TD[rows_B] + update_TD[rows_B]
