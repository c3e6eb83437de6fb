"""Rates that benchmarks measure, into the hardware file that the cost model reads, and as lines for people.

Knows the file and its words; what is measured is `runtime.bench.rate_bench`'s and `ep.exchange_bench`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runtime.costs.curves import Curve
from runtime.costs.hardware_file import check_target, write_hardware
from runtime.costs.rates import Rates, read_rates
from runtime.weights.hardware import read_hardware

KIND = "CPU"


def rate_lines(rates: Rates) -> list[str]:
    """What a layer's parts take, a line each."""
    product, expert, core = rates.product_us, rates.expert_us, rates.core_us
    return [
        f"products  {_pairs(product, 'tokens')} us for a million parameters",
        f"experts   {_pairs(expert, 'rows')} us for a million parameters, and {rates.expert_call_us:.0f} us each",
        f"attention {_pairs(core, 'tokens cached')} us for a million of heads x (2 latent + rope)",
        f"a layer   {_pairs(rates.layer_us, 'tokens')} us besides",
        f"a step    {_pairs(rates.host_us, 'tokens')} us besides",
    ]


def check_exchange_target(path: Path) -> None:
    """ValueError unless `path` is a CPU's profile that has rates already: an exchange alone says nothing of a step."""
    check_target(path, kind=KIND)
    if not path.exists() or read_rates(path) is None:
        raise ValueError(f"save is {str(path)!r}, which has no rates; write them first: serried bench kernels --save")


def save_exchange(path: Path, *, ranks: int, us_of_bytes: Mapping[float, float], comment: Sequence[str]) -> None:
    """Write what a group of so many ranks takes for so many bytes of one rank, in place of what was there for it."""
    check_exchange_target(path)
    rates = read_rates(path)
    assert rates is not None
    sizes = sorted(us_of_bytes)
    others = [each for each in rates.exchange_us if each[0] != ranks]
    curve = Curve(tuple(sizes), tuple([us_of_bytes[size] for size in sizes]))
    exchange_us = tuple(sorted([*others, (ranks, curve)], key=lambda each: each[0]))
    before = [line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")]
    head = before[: next((place for place, line in enumerate(before) if line.startswith("Microseconds;")), None)]
    kept = [line for line in head if not line.startswith("Exchange of ")]
    write_hardware(
        path, read_hardware(path), kind=KIND, comment=[*kept, *comment], rates=replace(rates, exchange_us=exchange_us)
    )


def _pairs(curve: Curve, unit: str) -> str:
    told = ", ".join([f"{x:g}: {y:,.0f}" for x, y in zip(curve.xs, curve.ys, strict=True)])
    return f"{{{unit}}} {told}"
