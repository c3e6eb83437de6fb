"""How long a step takes, from what every rank runs in it: the one model that planning and simulation use.

    step = layers x [ attention (slowest rank) | experts (level share) | exchange (fullest rank) ]
           + prompts (slowest rank) + head + host

    two tracks    each operation twice at half the tokens, exchange under compute:
                  layer = max(2 x compute(half) + share x exchange, exchange), exchange = 2 x exchange(half)
                  for compute runs on less of the device while the exchange takes its share of it

Where single operations get their times is an `Operations`: measured tables (`measured`) or peaks (`roofline`). Pure
arithmetic on shapes; knows no clock and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .curves import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What one rank runs in a step.

    decode_tokens       one for each request that decodes
    context_len         cached tokens that each of them attends to, on average
    prefill_tokens      tokens of prompts
    prefill_position    their mean position in their prompts
    """

    decode_tokens: int = 0
    context_len: float = 0.0
    prefill_tokens: int = 0
    prefill_position: float = 0.0


class StepTime(NamedTuple):
    """The parts of one step, microseconds; they add up. `exchange_us` is what no computation hides."""

    attention_us: float = 0.0
    experts_us: float = 0.0
    exchange_us: float = 0.0
    prefill_us: float = 0.0
    head_us: float = 0.0
    host_us: float = 0.0

    @property
    def total_us(self) -> float:
        """The whole step."""
        return sum(self)


class LayerTime(NamedTuple):
    """One MoE layer, microseconds."""

    attention_us: float
    experts_us: float
    exchange_us: float

    @property
    def compute_us(self) -> float:
        """What the rank computes; the rest is the exchange."""
        return self.attention_us + self.experts_us


class StepFrame(NamedTuple):
    """What operations repeat over and what a step has once: layers with and without experts, head and host.

    head_curve_us, host_curve_us   over tokens, where they do not take the same for any number of them
    """

    moe_layers: int
    dense_layers: int
    head_us: float
    host_us: float
    head_curve_us: Curve | None = None
    host_curve_us: Curve | None = None

    def head_at(self, tokens: float) -> float:
        """Microseconds of the head for so many tokens."""
        return self.head_us if self.head_curve_us is None else self.head_curve_us.at(tokens)

    def host_at(self, tokens: float) -> float:
        """Microseconds of the host for a step of so many tokens."""
        return self.host_us if self.host_curve_us is None else self.host_curve_us.at(tokens)


class Operations(Protocol):
    """Times of the operations of one model on one device in a group; microseconds, never falling as tokens grow.

    They are per layer, but `prefill_us` is per prompt token with everything in it.
    """

    @property
    def frame(self) -> StepFrame:
        """What a step has besides."""
        ...

    def attention_us(self, tokens: float, context_len: float) -> float:
        """Projections and attention of `tokens` with that mean context."""
        ...

    def experts_us(self, tokens: float, *, mean_tokens: float) -> float:
        """Shared expert of `tokens`, routed experts of what `mean_tokens` a rank bring, and what lies between."""
        ...

    def exchange_us(self, tokens: float) -> float:
        """Dispatch and combine when the fullest rank sends `tokens`."""
        ...

    def dense_us(self, tokens: float) -> float:
        """The MLP of a layer without experts, what lies between included."""
        ...

    def prefill_us(self, position: float) -> float:
        """One prompt token at that position."""
        ...


class StepCosts:
    """Step times from the times of operations.

    comm_share   of the multiprocessors, what exchanges take from kernels while both run; 0: they need none
    """

    def __init__(self, operations: Operations, *, comm_share: float = 0.0) -> None:
        assert 0.0 <= comm_share < 1.0, comm_share
        self.operations = operations
        self.comm_share = comm_share

    def step_time(self, shapes: Sequence[StepShape], *, tracks: int = 1) -> StepTime:
        """A step in which rank r runs `shapes[r]`; one shape stands for as many ranks as there are.

        tracks: 1, or as many micro-batches that hide the exchange from each other.
        """
        frame = self.operations.frame
        prefill_us = max([self._prefill_us(shape) for shape in shapes])
        tokens = max([shape.decode_tokens for shape in shapes])
        if tokens <= 0:
            return StepTime(prefill_us=prefill_us, host_us=frame.host_us)
        whole = self.layer_time(shapes)
        layer = whole if tracks == 1 else self._overlapped(shapes, tracks)
        return StepTime(
            attention_us=frame.moe_layers * layer.attention_us + frame.dense_layers * whole.attention_us,
            experts_us=frame.moe_layers * layer.experts_us + frame.dense_layers * self.operations.dense_us(tokens),
            exchange_us=frame.moe_layers * layer.exchange_us,
            prefill_us=prefill_us,
            head_us=frame.head_at(tokens),
            host_us=frame.host_at(tokens),
        )

    def layer_time(self, shapes: Sequence[StepShape], *, share: float = 1.0) -> LayerTime:
        """One MoE layer over that share of every rank's decode tokens."""
        tokens = share * max([shape.decode_tokens for shape in shapes])
        mean = share * sum([shape.decode_tokens for shape in shapes]) / len(shapes)
        return LayerTime(
            attention_us=self._attention_us(shapes, share=share),
            experts_us=self.operations.experts_us(tokens, mean_tokens=mean),
            exchange_us=self.operations.exchange_us(tokens),
        )

    def waits_us(self, shapes: Sequence[StepShape]) -> list[float]:
        """How long each rank waits for the slowest in a step, summed over its layers: its own attention and prompts
        take less than the slowest rank's."""
        layers = self.operations.frame.moe_layers + self.operations.frame.dense_layers
        own = [layers * self._attention_us([shape], share=1.0) + self._prefill_us(shape) for shape in shapes]
        slowest = max(own)
        return [slowest - busy for busy in own]

    def prefill_tokens_within(self, spare_us: float, *, start: int) -> int:
        """How many prompt tokens from position `start` on take at most `spare_us`; 0 when there is no room."""
        if spare_us <= 0:
            return 0
        at_start = spare_us / self.operations.prefill_us(start)
        return int(spare_us / self.operations.prefill_us(start + at_start / 2))

    def _attention_us(self, shapes: Sequence[StepShape], *, share: float) -> float:
        """The slowest rank's; a rank without tokens has none to do."""
        return max(
            [
                self.operations.attention_us(share * shape.decode_tokens, shape.context_len)
                for shape in shapes
                if shape.decode_tokens > 0
            ],
            default=0.0,
        )

    def _prefill_us(self, shape: StepShape) -> float:
        if not shape.prefill_tokens:
            return 0.0
        return shape.prefill_tokens * self.operations.prefill_us(shape.prefill_position)

    def _overlapped(self, shapes: Sequence[StepShape], tracks: int) -> LayerTime:
        part = self.layer_time(shapes, share=1 / tracks)
        exchange_us, compute_us = tracks * part.exchange_us, tracks * part.compute_us
        return LayerTime(
            attention_us=tracks * part.attention_us,
            experts_us=tracks * part.experts_us,
            exchange_us=max(self.comm_share * exchange_us, exchange_us - compute_us),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ItlBudget:
    """The prompt tokens that keep a step within a target between two tokens, by the cost model (`StepBudget`).

    target_ms    as long as a step with decodes may take
    min_tokens   are allowed whatever the target says, so that a target below the bare decode step starves no prompt
    """

    costs: StepCosts
    target_ms: float
    min_tokens: int = 64

    def prefill_tokens(self, *, decode_tokens: int, context_tokens: int, prefill_start: int) -> int:
        """For the fullest rank of the group."""
        shape = StepShape(decode_tokens=decode_tokens, context_len=context_tokens / max(decode_tokens, 1))
        spare_us = self.target_ms * 1000 - self.costs.step_time([shape]).total_us
        return max(self.min_tokens, self.costs.prefill_tokens_within(spare_us, start=prefill_start))
