"""The measured operation tables of one device and one model, from the `[costs]` part of a file in profiles/hardware.

Knows names and shapes of the tables; does not know how a step is put together from them (see `costs`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .curves import Curve, Grid
from .roofline import CostShape

_NUMBERS = (
    "moe_layers", "dense_layers", "experts", "top_k", "node_size", "glue_us", "head_us", "host_us",
)  # fmt: skip
_OPTIONAL = ("shape",)
_PARTS = ("model", *_NUMBERS, "projections", "core", "shared", "dense", "routed", "exchange", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTable:
    """Times of one group size over tokens a rank, with one row for each token and expert."""

    ranks: int
    dispatch_us: Curve
    combine_us: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTables:
    """What was measured; microseconds, per layer, except head and host (per step) and prefill (per prompt token).

    projections_us   attention beside its core, over tokens
    core_us          its core, over tokens and mean context
    shared_us        shared expert and router, over tokens
    dense_us         MLP of a layer without experts, over tokens
    routed_us        routed experts, over experts held here and tokens a rank, at level load
    prefill_us       over the mean position of the prompt tokens
    shape            sizes of the model that was measured; None: its times cannot be carried over to others
    """

    model: str
    moe_layers: int
    dense_layers: int
    experts: int
    top_k: int
    node_size: int
    glue_us: float
    head_us: float
    host_us: float
    projections_us: Curve
    core_us: Grid
    shared_us: Curve
    dense_us: Curve
    routed_us: Grid
    exchange: tuple[ExchangeTable, ...]
    prefill_us: Curve
    shape: CostShape | None = None

    def check_model(self, *, experts: int, top_k: int, moe_layers: int, dense_layers: int) -> None:
        """ValueError unless these are the sizes of the model that was measured."""
        asked = {"experts": experts, "top_k": top_k, "moe_layers": moe_layers, "dense_layers": dense_layers}
        for name, value in asked.items():
            if value != getattr(self, name):
                raise ValueError(
                    f"{name} is {value}; these tables were measured with {self.model}, which has "
                    f"{getattr(self, name)}; for other models use the device's peaks (the roofline)"
                )


def read_cost_tables(path: Path | str) -> CostTables:
    """Read a file such as profiles/hardware/h200.toml. ValueError when it has no tables, or names what is wrong."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    if "costs" not in data:
        raise ValueError(f"{path} has no [costs]: nothing was measured on this device; use its peaks (the roofline)")
    try:
        return _tables(data["costs"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: [costs]: {error}") from error


def _tables(costs: Mapping[str, Any]) -> CostTables:
    for name in costs:
        if name not in (*_PARTS, *_OPTIONAL):
            raise ValueError(f"{name} is unknown; the parts are {', '.join(_PARTS)}")
    for name in _PARTS:
        if name not in costs:
            raise ValueError(f"{name} is missing; the parts are {', '.join(_PARTS)}")
    return CostTables(
        model=str(costs["model"]),
        **{name: _number(costs, name) for name in _NUMBERS},
        projections_us=_curve(costs["projections"], "tokens"),
        core_us=_grid(costs["core"], "tokens", "context"),
        shared_us=_curve(costs["shared"], "tokens"),
        dense_us=_curve(costs["dense"], "tokens"),
        routed_us=_grid(costs["routed"], "experts", "tokens"),
        exchange=_exchange(costs["exchange"], node_size=costs["node_size"]),
        prefill_us=_curve(costs["prefill"], "position"),
        shape=_shape(costs),
    )


def _shape(costs: Mapping[str, Any]) -> CostShape | None:
    found = costs.get("shape")
    if found is None:
        return None
    names = [field.name for field in fields(CostShape)]
    sizes = {name: costs[name] for name in names if name in costs} | found
    if set(sizes) != set(names):
        wrong = ", ".join(sorted(set(sizes) ^ set(names)))
        raise ValueError(f"shape has or lacks {wrong}; with the numbers above it must have {', '.join(names)}")
    return CostShape(**sizes)


def _number(costs: Mapping[str, Any], name: str) -> Any:
    value = costs[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")
    return value


def _curve(table: Mapping[str, Any], x: str, y: str = "us") -> Curve:
    return Curve(tuple(table[x]), tuple(table[y]))


def _grid(table: Mapping[str, Any], x: str, y: str) -> Grid:
    return Grid(tuple(table[x]), tuple(table[y]), tuple([tuple(row) for row in table["us"]]))


def _exchange(tables: list[Mapping[str, Any]], *, node_size: int) -> tuple[ExchangeTable, ...]:
    found = tuple(
        [
            ExchangeTable(
                ranks=table["ranks"],
                dispatch_us=_curve(table, "tokens", "dispatch_us"),
                combine_us=_curve(table, "tokens", "combine_us"),
            )
            for table in tables
        ]
    )
    sizes = [table.ranks for table in found]
    if sizes != sorted(set(sizes)) or sizes[:1] != [node_size]:
        raise ValueError(f"exchange has tables for {sizes} ranks; it must begin with a node of {node_size} and ascend")
    return found
