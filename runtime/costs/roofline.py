"""Times of operations at the device's peaks: a bound that nothing beats, and a model for devices without tables.

Every operation takes the longer of its arithmetic and its bytes; there are no gaps, no launches and no host. Symbols
as in the formulas of the models' papers: h hidden, H heads, q and c latent ranks of query and cache, r rope, n and v
per-head widths without rope, I expert width, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from attention_mla.config import fp8_row_bytes

from ..weights.hardware import Hardware
from .costs import StepFrame
from .traffic import RowsPer, Traffic, check_ratios

if TYPE_CHECKING:
    from ..model.model_config import ModelConfig

_BF16_BYTES = 2
_US = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CostShape:
    """The sizes of a model that its step time depends on. `fp8` says how matrices are stored and multiplied;
    `cache_bytes` are a token's in one layer of the cache."""

    hidden: int
    heads: int
    q_rank: int | None
    latent: int
    rope: int
    nope: int
    value: int
    expert_width: int
    dense_width: int
    experts: int
    shared_experts: int
    top_k: int
    vocab: int
    moe_layers: int
    dense_layers: int
    fp8: bool
    cache_bytes: int

    @classmethod
    def of(cls, model: ModelConfig, *, fp8_cache: bool = False) -> Self:
        """The sizes of a parsed model; its cache is in bfloat16 or in fp8."""
        mla, moe = model.mla, model.moe
        return cls(
            hidden=model.hidden_size,
            heads=mla.num_heads,
            q_rank=mla.q_lora_rank,
            latent=mla.kv_lora_rank,
            rope=mla.qk_rope_head_dim,
            nope=mla.qk_nope_head_dim,
            value=mla.v_head_dim,
            expert_width=moe.intermediate_size if moe else 0,
            dense_width=model.dense_intermediate_size,
            experts=moe.num_experts if moe else 0,
            shared_experts=moe.num_shared if moe else 0,
            top_k=moe.top_k if moe else 0,
            vocab=model.vocab_size,
            moe_layers=len(model.moe_layers),
            dense_layers=model.num_layers - len(model.moe_layers),
            fp8=model.quantization is not None,
            cache_bytes=fp8_row_bytes(mla.kv_lora_rank, mla.qk_rope_head_dim)
            if fp8_cache
            else _BF16_BYTES * mla.latent_width,
        )

    @property
    def projections(self) -> int:
        """Parameters of attention that every token is multiplied with."""
        query_in = self.hidden if self.q_rank is None else self.q_rank
        query = query_in * self.heads * (self.nope + self.rope)
        if self.q_rank is not None:
            query += self.hidden * self.q_rank
        return query + self.hidden * (self.latent + self.rope) + self.heads * self.value * self.hidden

    @property
    def absorbed(self) -> int:
        """Parameters of the two up-projections, multiplied per head in bf16."""
        return self.latent * self.heads * (self.nope + self.value)

    @property
    def expert(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.hidden * self.expert_width


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOperations:
    """`Operations` of a group of `ranks` at the peaks of `hardware`, with all local experts read in every layer.

    redundant, imbalance, wire_imbalance, padding   as of `MeasuredOperations`
    """

    shape: CostShape
    hardware: Hardware
    ranks: int
    node_size: int = 8
    imbalance: float = 1.0
    rows_per: RowsPer = "ranks"
    hierarchical: bool = False
    host_us: float = 0.0
    redundant: int = 0
    wire_imbalance: float = 1.0
    padding: float = 1.0

    def __post_init__(self) -> None:
        check_ratios(imbalance=self.imbalance, wire_imbalance=self.wire_imbalance, padding=self.padding)

    @property
    def frame(self) -> StepFrame:
        """See `Operations`. Of the head the vocabulary's weights are read once."""
        head_us = self._bytes_us(_BF16_BYTES * self.shape.vocab * self.shape.hidden)
        return StepFrame(self.shape.moe_layers, self.shape.dense_layers, head_us, self.host_us)

    def attention_us(self, tokens: float, context_len: float) -> float:
        """See `Operations`."""
        shape = self.shape
        core_flops = 2 * shape.heads * (2 * shape.latent + shape.rope) * tokens * context_len
        core_bytes = shape.cache_bytes * tokens * context_len
        return (
            self._matrix_us(tokens, shape.projections, parameters=shape.projections)
            + self._matrix_us(tokens, shape.absorbed, parameters=shape.absorbed, bf16=True)
            + max(core_flops / self.hardware.bf16_flops * _US, self._bytes_us(core_bytes))
        )

    def experts_us(self, tokens: float, *, mean_tokens: float) -> float:
        """See `Operations`."""
        shape = self.shape
        local = (shape.experts + self.redundant) / self.ranks * shape.expert
        router = shape.hidden * shape.experts
        shared = shape.shared_experts * shape.expert
        return (
            self._matrix_us(tokens, router, parameters=router, bf16=True)
            + self._matrix_us(tokens, shared, parameters=shared)
            + self._matrix_us(self.imbalance * mean_tokens, shape.top_k * shape.expert, parameters=local)
        )

    def exchange_us(self, tokens: float) -> float:
        """See `Operations`. Node and network carry rows at the same time."""
        if self.ranks == 1 or not self.shape.experts:
            return 0.0
        traffic = self._traffic
        tokens *= max(self.wire_imbalance, self.padding)
        there, back = self._row_bytes
        if self.hierarchical and traffic.nodes > 1:
            return self._by_node_us(traffic, tokens, there + back)
        there_us = self._rows_us(traffic, tokens * traffic.dispatch_rows * there)
        return there_us + self._rows_us(traffic, tokens * traffic.combine_rows * back)

    def sent_bytes(self, tokens: float) -> float:
        """Bytes that a rank sends to all others in one layer, there and back."""
        traffic, (there, back) = self._traffic, self._row_bytes
        tokens *= max(self.wire_imbalance, self.padding)
        return tokens * (self.ranks - 1) * (traffic.dispatch_rows * there + traffic.combine_rows * back)

    def dense_us(self, tokens: float) -> float:
        """See `Operations`."""
        weights = 3 * self.shape.hidden * self.shape.dense_width
        return self._matrix_us(tokens, weights, parameters=weights)

    def prefill_us(self, position: float) -> float:
        """See `Operations`. Arithmetic only: a prompt's tokens share every weight."""
        shape = self.shape
        layers = shape.moe_layers + shape.dense_layers
        active = shape.moe_layers * (shape.top_k + shape.shared_experts) * shape.expert
        active += shape.dense_layers * 3 * shape.hidden * shape.dense_width + layers * shape.projections
        core = 2 * shape.heads * (shape.nope + shape.rope + shape.value) * position
        narrow = layers * (core + 2 * shape.absorbed)
        return (2 * active / self._flops(bf16=False) + narrow / self.hardware.bf16_flops) * _US

    @property
    def _traffic(self) -> Traffic:
        shape = self.shape
        return Traffic(
            ranks=self.ranks, node_size=self.node_size, experts=shape.experts, top_k=shape.top_k, rows_per=self.rows_per
        )

    @property
    def _row_bytes(self) -> tuple[int, int]:
        """Of a row there, with what it says of its experts, and of one back."""
        hidden = self.shape.hidden
        there = hidden + 4 * hidden // 128 if self.shape.fp8 else _BF16_BYTES * hidden
        return there + 16, _BF16_BYTES * hidden

    def _matrix_us(self, tokens: float, used: float, *, parameters: float, bf16: bool = False) -> float:
        """`tokens` times `used` parameters each, of `parameters` that are read."""
        width = 1 if self.shape.fp8 and not bf16 else _BF16_BYTES
        return max(2 * used * tokens / self._flops(bf16=bf16) * _US, self._bytes_us(width * parameters))

    def _flops(self, *, bf16: bool) -> float:
        """Peak of the format; a device without fp8 multiplies in bf16."""
        fp8 = self.shape.fp8 and not bf16 and self.hardware.fp8_flops
        return self.hardware.fp8_flops if fp8 else self.hardware.bf16_flops

    def _bytes_us(self, num_bytes: float) -> float:
        return num_bytes / self.hardware.memory_bytes_per_s * _US

    def _by_node_us(self, traffic: Traffic, tokens: float, row_bytes: float) -> float:
        """One row a token and node over the network, then one to each rank that needs it: one after the other.

        Every rank hands on inside its node what all others of its place sent there: as many rows as it sends itself.
        """
        near = self.hardware.link_bytes_per_s or self.hardware.memory_bytes_per_s
        far = self.hardware.network_bytes_per_s or near
        handed_on = traffic.dispatch_rows * traffic.near * traffic.nodes
        return tokens * row_bytes * (traffic.node_rows / far + handed_on / near) * _US

    def _rows_us(self, traffic: Traffic, bytes_to_a_rank: float) -> float:
        """Without a link or a network of its own a device sends through its memory."""
        near = self.hardware.link_bytes_per_s or self.hardware.memory_bytes_per_s
        far = self.hardware.network_bytes_per_s or near
        return max(bytes_to_a_rank * traffic.near / near, bytes_to_a_rank * traffic.far / far) * _US
