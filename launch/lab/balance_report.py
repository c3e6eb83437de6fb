"""How level experts' ranks are under several placements, as tables for a person and as one object for a program.

Knows the numbers and how to lay them out; does not know how they were found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from eplb import Recording
from runtime.model.model_config import ModelConfig
from runtime.weights.memory import gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One placement of all layers. `balance_steps` is what the recorded steps had seen, None if none stands alone."""

    name: str
    balances: tuple[float, ...]
    balance: float
    balance_steps: float | None
    moves: int
    num_bytes: int
    step_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer before it is laid out."""

    recording: Recording
    model: ModelConfig | None
    num_ranks: int
    tokens_per_rank: float
    answers: tuple[Answer, ...]
    """As experts sit at the start, then each policy."""
    notes: tuple[str, ...]


def headline(report: Report) -> list[str]:
    """What was recorded, and what is planned."""
    recording = report.recording
    return [
        f"{recording.num_tokens:,} tokens of {recording.num_steps:,} steps, {recording.num_layers} MoE layers of "
        f"{recording.num_experts} experts, top {recording.top_k}",
        f"planned for {report.num_ranks} ranks, {report.tokens_per_rank:,.1f} tokens of each in a step",
    ]


def layer_table(report: Report) -> Table:
    """A line for each layer."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("layer", "hottest", *[f"balance {answer.name}" for answer in report.answers]):
        table.add_column(name, justify="right")
    loads_YE = report.recording.loads_YE
    hottest = loads_YE.max(axis=1) / loads_YE.mean(axis=1)
    for layer, heat in enumerate(hottest):
        table.add_row(str(layer), f"{heat:.1f} x", *[f"{answer.balances[layer]:.3f}" for answer in report.answers])
    return table


def summary_table(report: Report) -> Table:
    """A line for each placement."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("placement", "balance", "of steps", "experts to move", "bytes", "step"):
        table.add_column(name, justify="left" if name == "placement" else "right")
    for answer in report.answers:
        table.add_row(
            answer.name,
            f"{answer.balance:.3f}",
            "-" if answer.balance_steps is None else f"{answer.balance_steps:.3f}",
            f"{answer.moves:,}",
            "-" if report.model is None else gib(answer.num_bytes),
            "-" if answer.step_ms is None else f"{answer.step_ms:.2f} ms",
        )
    return table


def record(report: Report) -> dict[str, Any]:
    """The result for a program."""
    return {
        "ranks": report.num_ranks,
        "tokens_per_rank": round(report.tokens_per_rank, 3),
        "placements": {
            answer.name: {
                "balance": round(answer.balance, 4),
                "balance_steps": None if answer.balance_steps is None else round(answer.balance_steps, 4),
                "balance_layers": [round(balance, 4) for balance in answer.balances],
                "moves": answer.moves,
                "bytes": answer.num_bytes if report.model is not None else None,
                "step_ms": None if answer.step_ms is None else round(answer.step_ms, 3),
            }
            for answer in report.answers
        },
    }
