"""What the steps of a run took and held, all ranks together: from their `measures` to the figures of a report. Pure.

A step is one of the group: it ends on all ranks together, so its time is the slowest rank's, and what another rank had
left of it lies in its waits. Only steps that all ranks measured count.

Shapes: R ranks, L MoE layers, E experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..forward.part_times import MODEL_PARTS, Part
from ..requests.measures import RankMeasures, StepMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One step of all ranks, in rank order."""

    ranks: tuple[StepMeasure, ...]

    @property
    def total_ns(self) -> int:
        """On the wall."""
        return max([step.total_ns for step in self.ranks])

    @property
    def tokens_R(self) -> list[int]:
        """Tokens that each rank put through the layers."""
        return [step.decode_tokens + step.prefill_tokens for step in self.ranks]

    @property
    def only_decodes(self) -> bool:
        """No rank computed a prompt, and some rank decoded."""
        return not any(step.prefill_tokens for step in self.ranks) and any(step.decode_tokens for step in self.ranks)


def group_steps(measures: Sequence[RankMeasures], *, begin_s: float, end_s: float) -> list[GroupStep]:
    """Steps that began on rank 0 from `begin_s` to `end_s` of its machine's monotonic clock, oldest first."""
    others: list[Mapping[int, StepMeasure]] = [{step.step: step for step in rank.steps} for rank in measures[1:]]
    found = []
    for step in measures[0].steps:
        rest = [steps.get(step.step) for steps in others]
        if begin_s <= step.begin_ns / 1e9 < end_s and None not in rest:
            found.append(GroupStep(ranks=(step, *[each for each in rest if each is not None])))
    return found


def step_figures(steps: Sequence[GroupStep]) -> dict[str, Any]:
    """Of steps that only decode; None in place of figures where there is none.

    Parts are means over steps and ranks, milliseconds: on the wall they add up to the step of the average rank.
    """
    decodes = [step for step in steps if step.only_decodes]
    counts = {"steps": len(steps), "decode_steps": len(decodes)}
    if not decodes:
        return counts | dict.fromkeys(("step_ms", "step_cpu_ms", "parts_ms", "parts_cpu_ms"))
    measured = [rank for step in decodes for rank in step.ranks]
    wall, cpu = [np.asarray([getattr(each, name) for each in measured]) / 1e6 for name in ("wall_ns", "cpu_ns")]
    totals_ms = [step.total_ns / 1e6 for step in decodes]
    cuts = statistics.quantiles(totals_ms, n=100, method="inclusive") if len(totals_ms) > 1 else totals_ms * 99
    model_cpu = cpu[:, list(MODEL_PARTS)].sum()
    return (
        counts
        | {
            "step_ms": {"mean": statistics.fmean(totals_ms), "median": cuts[49], "p90": cuts[89], "p99": cuts[98]},
            "step_cpu_ms": float(np.median(cpu.sum(axis=1))),
            "parts_ms": _by_part(wall),
            "parts_cpu_ms": _by_part(cpu),
            "overhead_cpu_share": float(1.0 - model_cpu / cpu.sum()),
            "exposed_communication": sum([each.exposed_ns for each in measured]) / 1e6 / float(wall.sum()),
            "wait_at_beat": float(wall[:, Part.BEAT].sum() / wall.sum()),
            "dbo_hit_rate": statistics.fmean([float(step.ranks[0].tracks > 1) for step in decodes]),
            "context_len": sum([each.context_tokens for each in measured])
            / sum([each.decode_tokens for each in measured]),
        }
        | batch_figures(decodes)
    )


def batch_figures(steps: Sequence[GroupStep]) -> dict[str, Any]:
    """How full the ranks were, and how level: mean over max of their tokens, weighted by the length of the steps."""
    tokens_R = np.asarray([step.tokens_R for step in steps])
    by_rank = tokens_R.mean(axis=0)
    return {
        "batch_per_gpu": float(by_rank.mean()),
        "batch_min": float(by_rank.min()),
        "batch_median": float(np.median(by_rank)),
        "batch_max": float(by_rank.max()),
        "balance_ratio": float(tokens_R.sum() / (tokens_R.max(axis=1).sum() * tokens_R.shape[1])),
    }


def _by_part(values: np.ndarray) -> dict[str, float]:
    return {part.name.lower(): float(values[:, part].mean()) for part in Part}


def expert_loads(measures: Sequence[RankMeasures]) -> list[list[int]]:
    """[L][E] pairs that all ranks' tokens sent to each expert; empty without MoE layers."""
    counted = [np.asarray(rank.counts_LE) for rank in measures if rank.counts_LE]
    return np.sum(counted, axis=0).tolist() if counted else []


def balancedness(counts_LE: Sequence[Sequence[int]]) -> float | None:
    """Mean over max of the experts of a layer, averaged over layers; None where nothing was counted."""
    layers = [statistics.fmean(counts_E) / max(counts_E) for counts_E in counts_LE if any(counts_E)]
    return statistics.fmean(layers) if layers else None


def timeline(steps: Sequence[GroupStep], *, most: int = 60) -> list[dict[str, Any]]:
    """The last `most` steps for a picture: rank by rank the parts in milliseconds."""
    return [
        {
            "step": step.ranks[0].step,
            "total_ms": step.total_ns / 1e6,
            "tokens": step.tokens_R,
            "prefill_tokens": sum([rank.prefill_tokens for rank in step.ranks]),
            "parts_ms": [[round(ns / 1e6, 3) for ns in rank.wall_ns] for rank in step.ranks],
        }
        for step in steps[-most:]
    ]
