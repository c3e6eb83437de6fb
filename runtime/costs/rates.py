"""What any model's operations take on a device that was measured piece by piece: the `[rates]` of its hardware file.

    product   a million parameters times T tokens       floor: the weights are read; slope: they are multiplied
    expert    the same of one routed expert, times the rows that visit it; a call for each expert besides
    core      a token's attention over a context, for a million of heads x (2 latent + rope)
    layer     all else in a layer, calls of functions included, over tokens
    host      all else in a step, over tokens
    exchange  dispatch and combine of a group, over the bytes that a rank sends there and back

`serried bench kernels --save` writes them, and `serried bench exchange --save` the last. Times are one rank's own, so
ranks that share cores or memory take longer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from .costs import StepFrame
from .curves import Curve
from .roofline import CostShape, RooflineOperations

_MILLION = 1e6
_RATES_COMMENT = "# Microseconds; what each is counted for is said in runtime/costs/rates.py."
PARTS = ("product", "expert", "expert_call_us", "core", "layer", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Microseconds.

    product_us    over tokens, for a million parameters
    expert_us     over rows of one expert, for a million of its parameters
    expert_call_us   for each expert that is visited
    core_us       over the context of one token, for a million heads x (2 latent + rope)
    layer_us, host_us   over tokens
    exchange_us   (ranks, curve over bytes) of every group that was measured, ascending; may be empty
    """

    product_us: Curve
    expert_us: Curve
    expert_call_us: float
    core_us: Curve
    layer_us: Curve
    host_us: Curve
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
        host = self.rates.host_us if not self.bound.host_us else None
        host_us = self.bound.host_us or self.rates.host_us.ys[0]
        return StepFrame(shape.moe_layers, shape.dense_layers, curve.ys[0], host_us, curve, host)

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
        return visited * (shape.expert / _MILLION * self.rates.expert_us.at(rows) + self.rates.expert_call_us)


def rates_text(rates: Rates) -> str:
    """As the TOML that `read_rates` reads; three digits, for nothing measured is more exact."""
    lines = [_RATES_COMMENT, "[rates]", f"expert_call_us = {_rounded(rates.expert_call_us)}"]
    for name, x, curve in (
        ("product", "tokens", rates.product_us),
        ("expert", "rows", rates.expert_us),
        ("core", "context", rates.core_us),
        ("layer", "tokens", rates.layer_us),
        ("host", "tokens", rates.host_us),
    ):
        lines += ["", f"[rates.{name}]", *_curve_lines(x, curve)]
    for ranks, curve in rates.exchange_us:
        lines += ["", "[[rates.exchange]]", f"ranks = {ranks}", *_curve_lines("bytes", curve)]
    return "\n".join(lines) + "\n"


def _curve_lines(x: str, curve: Curve) -> list[str]:
    places = ", ".join([f"{place:g}" if place != int(place) else f"{int(place)}" for place in curve.xs])
    return [f"{x} = [{places}]", f"us = [{', '.join([_rounded(value) for value in curve.ys])}]"]


def _rounded(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


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
        expert_call_us=float(rates["expert_call_us"]),
        core_us=_rising(rates["core"], "context"),
        layer_us=_rising(rates["layer"], "tokens"),
        host_us=_rising(rates["host"], "tokens"),
        exchange_us=tuple([(table["ranks"], _rising(table, "bytes")) for table in rates.get("exchange", [])]),
    )


def _rising(table: Mapping[str, Any], x: str) -> Curve:
    """Times never fall as work grows; where they were measured to, noise did it, and the larger one holds."""
    return Curve(tuple(table[x]), tuple(accumulate(table["us"], max)))
