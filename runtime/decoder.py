"""The model as one generator: token ids in, logits of the asked rows out, a `yield` wherever another rank must answer.

Knows weights, the latent cache and the MoE layers; does not know requests, sampling or how many tracks are driven.

Shapes: T tokens here, B rows that get logits, D model, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_mla import LatentCache, PagedView, Rotation, angles, attend, rms_norm
from ep import Exchange, Pending, Terms
from moe import MoeLayer, PlacementTable

from .model_config import ModelConfig
from .weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackInput:
    """One micro-batch of one step.

    tokens_T        int64 token ids
    view            where the tokens' latents go and what they attend to
    logit_rows_B    int64 indices into T of the tokens whose next token is wanted
    step, track     the tag of every exchange
    terms           what all ranks agreed on for its exchanges
    """

    tokens_T: Tensor
    view: PagedView
    logit_rows_B: Tensor
    step: int
    track: int
    terms: Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOutput:
    """What a step leaves behind.

    logits_BV   in float32 or wider
    counts_LE   int64: this rank's tokens routed to each expert, one row per MoE layer
    num_pairs   (token, expert) pairs that this rank's own experts computed, all layers together
    """

    logits_BV: Tensor
    counts_LE: Tensor
    num_pairs: int = 0


class Decoder:
    """One rank's model over its own latent cache.

    `weights` hold this rank's experts only; `exchange` reaches the others; `table` says where every expert sits.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: DecoderWeights,
        *,
        cache: LatentCache,
        exchange: Exchange | None,
        table: PlacementTable | None,
        rank: int,
    ) -> None:
        self.model = model
        self.weights = weights
        self.cache = cache
        self.dtype = weights.embed_VD.dtype
        self.moe_layers = {
            index: MoeLayer(
                model.moe,
                layer.moe,
                exchange=exchange,
                table=table,
                rank=rank,
            )
            for index, layer in enumerate(weights.layers)
            if layer.moe is not None and model.moe is not None and exchange is not None and table is not None
        }

    def stages(self, batch: TrackInput) -> Generator[Pending[Any] | None, Any, DecoderOutput]:
        """Run the layers over one micro-batch; a rank with no tokens runs them as well, with T = 0."""
        x_TD = self.weights.embed_VD[batch.tokens_T]
        rotation = angles(self.model.mla.rope, self.model.mla.qk_rope_head_dim, batch.view.positions_T, self.dtype)
        counts = []
        num_pairs = 0
        for index, layer in enumerate(self.weights.layers):
            x_TD = x_TD + self._attention(x_TD, layer, index, batch, rotation)
            h_TD = rms_norm(x_TD, layer.post_norm_D, self.model.rms_norm_eps)
            if layer.dense is not None:
                x_TD = x_TD + layer.dense(h_TD)
                continue
            out = yield from self.moe_layers[index].stages(
                h_TD,
                step=batch.step,
                layer=index,
                track=batch.track,
                terms=batch.terms,
                positions_T=batch.view.positions_T,
            )
            x_TD = x_TD + out.out_TD
            counts.append(out.counts_E)
            num_pairs += out.num_pairs
        logits_BV = self._logits(x_TD[batch.logit_rows_B])
        experts = self.model.moe.num_experts if self.model.moe is not None else 0
        counts_LE = torch.stack(counts) if counts else torch.zeros(0, experts, dtype=torch.int64)
        return DecoderOutput(logits_BV=logits_BV, counts_LE=counts_LE, num_pairs=num_pairs)

    def _attention(
        self, x_TD: Tensor, layer: LayerWeights, index: int, batch: TrackInput, rotation: Rotation
    ) -> Tensor:
        h_TD = rms_norm(x_TD, layer.input_norm_D, self.model.rms_norm_eps)
        return attend(
            h_TD,
            layer.attention,
            config=self.model.mla,
            cache=self.cache,
            layer=index,
            view=batch.view,
            rotation=rotation,
        )

    def _logits(self, x_BD: Tensor) -> Tensor:
        """[B, V] in the head's dtype, which is float32 or wider: 16-bit logits would tie where the model does not."""
        h_BD = rms_norm(x_BD, self.weights.norm_D, self.model.rms_norm_eps)
        return linear(h_BD.to(self.weights.head_VD.dtype), self.weights.head_VD)
