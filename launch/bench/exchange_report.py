"""What `serried bench exchange` found of each size and way, as a line of its table and of its summary.

Knows times and bytes; how they are measured is `ep.exchange_bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from ep import ExchangeConfig
from ep.exchange_bench import ExchangeTimes, Load
from runtime.weights.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement: what was asked, and all ranks' times."""

    load: Load
    config: ExchangeConfig
    times: Sequence[ExchangeTimes]

    @property
    def name(self) -> str:
        return self.config.exchange + (", over nodes" if self.config.hierarchical == "on" else "")

    def slowest(self, field: str) -> float:
        """The others wait for it."""
        return max(getattr(times, field) for times in self.times)

    def summary(self, hardware: Hardware | None) -> dict[str, object]:
        """For the last line."""
        sent = self.times[0].sent
        found: dict[str, object] = {
            "tokens": self.load.tokens,
            "hidden": self.load.hidden,
            "exchange": self.config.exchange,
            "hierarchical": self.config.hierarchical,
            "exchange_us": round(self.slowest("whole_us"), 1),
            "wire_us": round(self.slowest("wire_us"), 1),
            "plain_us": round(self.slowest("plain_us"), 1),
            "ratio": round(self.slowest("whole_us") / self.slowest("plain_us"), 3),
            "wire_ratio": round(self.slowest("wire_us") / self.slowest("plain_us"), 3),
            "packing_cpu_us": round(self.slowest("packing_cpu_us"), 1),
            "network_bytes": sent.network,
            "node_bytes": sent.node,
        }
        if hardware is not None:
            found["hardware_us"] = round(link_us(self.times[0], hardware), 1)
        return found


def link_us(times: ExchangeTimes, hardware: Hardware) -> float:
    """How long the bytes take at the device's peaks, node and network at the same time."""
    inside = times.sent.node / hardware.link_bytes_per_s
    outside = times.sent.network / hardware.network_bytes_per_s if times.sent.network else 0.0
    return 1e6 * max(inside, outside)


def us_of_bytes(lines: Sequence[Line]) -> dict[float, float]:
    """Bytes that the fullest rank sends there and back, and what that takes; of several ways, the first."""
    first = lines[0].name
    return {
        float(max([times.sent.node + times.sent.network for times in line.times])): line.slowest("whole_us")
        for line in lines
        if line.name == first
    }


def exchange_table(lines: Sequence[Line], hardware: Hardware | None) -> Table:
    """Microseconds, MiB and ratios: a line for each size and way."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    heads = "tokens", "hidden", "exchange", "us", "plain", "ratio", "on the wire", "packing, CPU", "MiB network", "node"
    for name in [*heads, *(["at peak"] if hardware else [])]:
        table.add_column(name, justify="left" if name == "exchange" else "right")
    for line in lines:
        found = line.summary(hardware)
        sent = line.times[0].sent
        cells = [
            f"{line.load.tokens}",
            f"{line.load.hidden}",
            line.name,
            f"{found['exchange_us']:.0f}",
            f"{found['plain_us']:.0f}",
            f"{found['ratio']:.2f}",
            f"{found['wire_ratio']:.2f}",
            f"{found['packing_cpu_us']:.0f}",
            f"{sent.network / 2**20:.2f}",
            f"{sent.node / 2**20:.2f}",
        ]
        table.add_row(*cells, *([f"{found['hardware_us']:.0f}"] if hardware else []))
    return table
