"""How the exchange is built when a user leaves it open: counts first or fixed capacities, over nodes or straight.

    exact      counts first: one more trip to all ranks before the rows, no padding; the host reads the counts
    bounded    fixed capacities: no count is waited for, padding costs bytes; what a captured step needs
    by node    one row a token and node over the network, then on inside the node

On GPUs the back ends that are installed stand beside `bounded`, straight to every rank, and a trial at start decides
(`exchange_trial`). Pure arithmetic on the cost model's traffic and a device's peaks; reads nothing and builds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ep import ExchangeConfig
from ep.config import BACK_ENDS, ExchangeMode

from ..costs.roofline import CostShape, RooflineOperations
from ..weights.hardware import Hardware

MARGIN = 1.1
"""A way round through nodes must promise so much more, for handing rows on is not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeChoice:
    """What was settled, and why: a line for people."""

    mode: ExchangeMode
    hierarchical: bool
    why: str


def choose_exchange(
    shape: CostShape,
    *,
    mode: ExchangeMode,
    hierarchical: str,
    ranks: int,
    node_size: int,
    tokens: int,
    on_gpu: bool,
    hardware: Hardware | None,
) -> ExchangeChoice:
    """Settle `auto`; what a user asked for stays.

    tokens     of a full step on one rank
    hardware   peaks to compare by; None: the network is taken to be the narrow place that it is everywhere

    Raises ValueError when rows are to go by node and nodes are not even.
    """
    if mode in BACK_ENDS:
        return ExchangeChoice(mode=mode, hierarchical=False, why=f"{mode} as asked; straight, as it has no other way")
    by_node, why_nodes = _choose_nodes(shape, hierarchical, ranks, node_size, tokens, hardware)
    if mode != "auto":
        return ExchangeChoice(mode=mode, hierarchical=by_node, why=f"{mode} as asked; {why_nodes}")
    if on_gpu:
        why = "bounded, for a captured step cannot read counts"
        return ExchangeChoice(mode="bounded", hierarchical=by_node, why=f"{why}; {why_nodes}")
    why = "exact, for on a CPU the host is there to count and padding would only cost bytes"
    return ExchangeChoice(mode="exact", hierarchical=by_node, why=f"{why}; {why_nodes}")


def to_try(
    asked: ExchangeConfig, settled: ExchangeConfig, *, installed: Sequence[ExchangeMode]
) -> tuple[ExchangeConfig, ...]:
    """What a trial at start compares on GPUs: what was settled, then the back ends that are installed. Nothing where a
    user has chosen, or asked for what back ends do not have."""
    if asked.exchange != "auto" or asked.combine == "slots" or asked.hierarchical == "on" or not installed:
        return ()
    return (settled, *(replace(asked, exchange=mode, hierarchical="off") for mode in installed))


def _choose_nodes(
    shape: CostShape, asked: str, ranks: int, node_size: int, tokens: int, hardware: Hardware | None
) -> tuple[bool, str]:
    nodes, rest = divmod(ranks, node_size)
    if asked == "on" and rest:
        raise ValueError(
            f"hierarchical is on, but {ranks} ranks do not fill nodes of {node_size}; node_size must divide ranks, "
            f"e.g. {_divisor(ranks, node_size)}"
        )
    if asked != "auto":
        return asked == "on", "by node as asked" if asked == "on" else "straight as asked"
    if rest:
        return False, f"straight, for {ranks} ranks do not fill nodes of {node_size}"
    if nodes <= 1:
        return False, "straight, for all ranks are on one node"
    if not shape.experts:
        return False, "straight, for there are no experts"
    if node_size == 1:
        return False, "straight, for a node has one rank and gets one row anyway"
    if hardware is None:
        return True, "by node, for the network carries each row once a node then"
    straight_us, by_node_us = (
        RooflineOperations(
            shape=shape, hardware=hardware, ranks=ranks, node_size=node_size, hierarchical=through
        ).exchange_us(tokens)
        for through in (False, True)
    )
    told = f"{by_node_us:,.0f} us a layer by node, {straight_us:,.0f} us straight at {tokens} tokens a rank"
    if by_node_us * MARGIN < straight_us:
        return True, f"by node: {told}"
    return False, f"straight: {told}"


def _divisor(ranks: int, near: int) -> int:
    """The largest divisor of `ranks` that is at most `near`."""
    return max(size for size in range(1, max(near, 1) + 1) if ranks % size == 0)
