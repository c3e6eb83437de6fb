"""What any model's operations take on a device that was measured piece by piece: the `[rates]` of its hardware file.

    product   a million parameters times T tokens       floor: the weights are read; slope: they are multiplied
    expert    the same of one routed expert, times the rows that visit it
    core      a token's attention over a context, for a million of heads x (2 latent + rope)
    layer     all else in a layer, calls of functions included; host: all else in a step
    exchange  dispatch and combine of a group, over the bytes that a rank sends there and back

`serried bench kernels --save` writes them, and `serried bench exchange --save` the last. Times are one rank's own, so
ranks that share cores or memory take longer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .costs import StepFrame
from .curves import Curve
from .roofline import CostShape, RooflineOperations

_MILLION = 1e6
PARTS = ("product", "expert", "core", "layer", "host_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Microseconds.

    product_us    over tokens, for a million parameters
    expert_us     over rows of one expert, for a million of its parameters
    core_us       over the context of one token, for a million heads x (2 latent + rope)
    layer_us      over tokens
    exchange_us   (ranks, curve over bytes) of every group that was measured, ascending; may be empty
    """

    product_us: Curve
    expert_us: Curve
    core_us: Curve
    layer_us: Curve
    host_us: float
    exchange_us: tuple[tuple[int, Curve], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedOperations:
    """`Operations` of a model by a device's rates. `bound` says model, device and group, and what was not measured."""

    rates: Rates
    bound: RooflineOperations

    @property
    def shape(self) -> CostShape:
        """The model's sizes."""
        return self.bound.shape

    @property
    def frame(self) -> StepFrame:
        """See `Operations`. The head is a product like others."""
        shape, head = self.shape, self.rates.product_us
        millions = shape.vocab * shape.hidden / _MILLION
        curve = Curve(head.xs, tuple([millions * us for us in head.ys]))
        host_us = self.bound.host_us or self.rates.host_us
        return StepFrame(shape.moe_layers, shape.dense_layers, curve.ys[0], host_us, curve)

    def attention_us(self, tokens: float, context_len: float) -> float:
        """See `Operations`."""
        shape = self.shape
        core = tokens * self.rates.core_us.at(context_len) * shape.heads * (2 * shape.latent + shape.rope) / _MILLION
        return self._product_us(tokens, shape.projections + shape.absorbed) + core

    def experts_us(self, tokens: float, *, mean_tokens: float) -> float:
        """See `Operations`."""
        shape = self.shape
        alike = shape.hidden * shape.experts + shape.shared_experts * shape.expert
        return self._product_us(tokens, alike) + self._routed_us(mean_tokens) + self.rates.layer_us.at(tokens)

    def exchange_us(self, tokens: float) -> float:
        """See `Operations`. Between group sizes that were measured the next larger one counts; else the bound."""
        if self.bound.ranks == 1 or not self.shape.experts:
            return 0.0
        for ranks, curve in self.rates.exchange_us:
            if ranks >= self.bound.ranks:
                return curve.at(self.bound.sent_bytes(tokens))
        return self.bound.exchange_us(tokens)

    def dense_us(self, tokens: float) -> float:
        """See `Operations`."""
        weights = 3 * self.shape.hidden * self.shape.dense_width
        return self._product_us(tokens, weights) + self.rates.layer_us.at(tokens)

    def prefill_us(self, position: float) -> float:
        """See `Operations`. Weights are read once for many tokens: the slope of products, and attention's own rate."""
        return self.bound.prefill_us(position) * self._slowness

    @property
    def _slowness(self) -> float:
        """Time of a large product over what the peak says of it."""
        tokens = self.rates.product_us.xs[-1]
        peak_us = 2 * _MILLION * tokens / self.bound.hardware.bf16_flops * 1e6
        return max(self.rates.product_us.ys[-1] / peak_us, 1.0)

    def _product_us(self, tokens: float, parameters: float) -> float:
        return parameters / _MILLION * self.rates.product_us.at(tokens)

    def _routed_us(self, mean_tokens: float) -> float:
        """Experts that any token visits, each with its share of the rows."""
        shape, bound = self.shape, self.bound
        if not shape.experts or mean_tokens <= 0:
            return 0.0
        held = (shape.experts + bound.redundant) / bound.ranks
        missed = (1.0 - shape.top_k / shape.experts) ** (bound.ranks * mean_tokens)
        visited = max(held * (1.0 - missed), min(1.0, held))
        rows = bound.imbalance * mean_tokens * shape.top_k / visited
        return visited * shape.expert / _MILLION * self.rates.expert_us.at(rows)


def read_rates(path: Path | str) -> Rates | None:
    """The `[rates]` of a file such as profiles/hardware/cpu.toml; None where it has none.

    Raises ValueError for a part that is unknown, missing or no table.
    """
    path = Path(path)
    rates = tomllib.loads(path.read_text(encoding="utf-8")).get("rates")
    if rates is None:
        return None
    try:
        return _rates(rates)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: [rates]: {error}") from error


def _rates(rates: Mapping[str, Any]) -> Rates:
    for name in rates:
        if name not in (*PARTS, "exchange"):
            raise ValueError(f"{name} is unknown; the parts are {', '.join(PARTS)}, exchange")
    for name in PARTS:
        if name not in rates:
            raise ValueError(f"{name} is missing; the parts are {', '.join(PARTS)}, exchange")
    sizes = [table["ranks"] for table in rates.get("exchange", [])]
    if sizes != sorted(set(sizes)):
        raise ValueError(f"exchange has tables for {sizes} ranks; they must ascend, e.g. {sorted(set(sizes))}")
    return Rates(
        product_us=_rising(rates["product"], "tokens"),
        expert_us=_rising(rates["expert"], "rows"),
        core_us=_rising(rates["core"], "context"),
        layer_us=_rising(rates["layer"], "tokens"),
        host_us=float(rates["host_us"]),
        exchange_us=tuple([(table["ranks"], _rising(table, "bytes")) for table in rates.get("exchange", [])]),
    )


def _rising(table: Mapping[str, Any], x: str) -> Curve:
    """Times never fall as work grows; where they were measured to, noise did it, and the larger one holds."""
    highest, ys = 0.0, []
    for us in table["us"]:
        highest = max(highest, us)
        ys.append(highest)
    return Curve(tuple(table[x]), tuple(ys))
