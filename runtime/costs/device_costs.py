"""Times of operations of any model on a device whose file is known: the best that there is, and where it comes from.

    tables     this model was measured on this device
    rates      the device was measured, not the model: `serried bench kernels --save`
    scaled     another model or device was measured: its times by the ratio of the bounds (`scaled`)
    peaks      nothing was measured: the bounds themselves (`roofline`)

What plans, simulates, budgets prompts and cuts steps all takes its times from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..weights.hardware import Hardware, costs_like, has_costs, read_hardware
from .cost_tables import CostTables, read_cost_tables
from .costs import Operations
from .measured import MeasuredOperations
from .rates import RatedOperations, Rates, read_rates
from .roofline import CostShape, RooflineOperations
from .scaled import ScaledOperations
from .traffic import RowsPer


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How a group of ranks is built; what each field means is said at `MeasuredOperations`."""

    ranks: int
    node_size: int = 8
    redundant: int = 0
    imbalance: float = 1.0
    wire_imbalance: float = 1.0
    padding: float = 1.0
    rows_per: RowsPer = "ranks"
    hierarchical: bool = False
    host_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """What is known of a device. `tables` may have been measured on another one, `measured_on`."""

    hardware: Hardware
    tables: CostTables | None = None
    measured_on: Hardware | None = None
    rates: Rates | None = None

    def operations(self, shape: CostShape, group: Group) -> Operations:
        """Times of the model of that shape in such a group."""
        if self.rates is not None:
            return RatedOperations(rates=self.rates, bound=self._bound(shape, group))
        tables = self.tables
        if tables is None or (tables.shape is None and not self._fits(shape)):
            return self._bound(shape, group)
        if self._fits(shape):
            return _measured(tables, group)
        assert tables.shape is not None
        assert self.measured_on is not None
        as_measured = replace(
            group, redundant=round(group.redundant * tables.experts / shape.experts) if shape.experts else 0
        )
        return ScaledOperations(
            measured=_measured(tables, as_measured),
            there=_bound(tables.shape, self.measured_on, as_measured),
            here=self._bound(shape, group),
        )

    def source(self, shape: CostShape) -> str:
        """Where the times of that model come from, for people."""
        name = self.hardware.name
        if self.rates is not None:
            return f"rates measured on {name}"
        if self.tables is None or (self.tables.shape is None and not self._fits(shape)):
            return f"peaks of {name}; nothing was measured for this model"
        if self._fits(shape):
            return f"tables of {self.tables.model} on {name}"
        there = self.measured_on.name if self.measured_on else name
        return f"tables of {self.tables.model} on {there}, scaled by the ratio of the peaks"

    def _fits(self, shape: CostShape) -> bool:
        """Whether the tables are this model's, on this device."""
        tables = self.tables
        if tables is None or self.measured_on != self.hardware:
            return False
        if tables.shape is not None:
            return tables.shape == shape
        sizes = (shape.experts, shape.top_k, shape.moe_layers, shape.dense_layers)
        return sizes == (tables.experts, tables.top_k, tables.moe_layers, tables.dense_layers)

    def _bound(self, shape: CostShape, group: Group) -> RooflineOperations:
        return _bound(shape, self.hardware, group)


def read_device_costs(path: Path | str) -> DeviceCosts:
    """Read a file such as profiles/hardware/h200.toml, and the one beside it whose tables it refers to, if any.

    Raises ValueError for what is wrong in either, OSError for what cannot be read.
    """
    path = Path(path)
    hardware, rates, like = read_hardware(path), read_rates(path), costs_like(path)
    source = path if like is None else path.with_name(f"{like}.toml")
    if like is not None and not source.is_file():
        raise ValueError(f"{path}: costs_like is {like!r}; it must be a device whose file lies beside, e.g. h200")
    if not has_costs(source):
        return DeviceCosts(hardware=hardware, rates=rates)
    measured_on = hardware if like is None else read_hardware(source)
    return DeviceCosts(hardware=hardware, rates=rates, tables=read_cost_tables(source), measured_on=measured_on)


def _measured(tables: CostTables, group: Group) -> MeasuredOperations:
    return MeasuredOperations(
        tables=tables,
        ranks=group.ranks,
        node_size=group.node_size,
        redundant=group.redundant,
        imbalance=group.imbalance,
        wire_imbalance=group.wire_imbalance,
        padding=group.padding,
        rows_per=group.rows_per,
        hierarchical=group.hierarchical,
        host_us=group.host_us,
    )


def _bound(shape: CostShape, hardware: Hardware, group: Group) -> RooflineOperations:
    return RooflineOperations(
        shape=shape,
        hardware=hardware,
        ranks=group.ranks,
        node_size=group.node_size,
        redundant=group.redundant,
        imbalance=group.imbalance,
        wire_imbalance=group.wire_imbalance,
        padding=group.padding,
        rows_per=group.rows_per,
        hierarchical=group.hierarchical,
        host_us=group.host_us or 0.0,
    )
