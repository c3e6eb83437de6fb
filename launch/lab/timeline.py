"""A picture of ranks and steps, for a terminal: who decodes, who computes prompts, and who waits for them.

    step     7 8    9  11            a column is a slice of time, or a whole step where steps are shorter than that;
    rank 0   d ####d d d d..         inside a step: prompts first, then tokens that decode, then waiting
    rank 1   d d.... d d ###

Glyphs alone say everything; colours only help. Knows records of steps; does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from runtime.simulation.simulation_record import Run, StepRecord, Window

PROMPT, DECODE, WAIT, FAILED = "#", "d", ".", "x"
STYLES = {PROMPT: "bold yellow", DECODE: "green", WAIT: "dim", FAILED: "bold red"}

MAX_ROWS = 16
_SLICES_MS = (5, 10, 15, 20, 30, 40, 50, 70, 100, 150, 200, 300, 400, 500, 700, 1000, 2000, 5000)
_AFTER_FAILURE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Steps as columns. `slice_us` of time is one column, every step has at least one, and none runs in a gap."""

    steps: tuple[StepRecord, ...]
    slice_us: float

    @classmethod
    def of(cls, run: Run, window: Window, *, columns: int) -> Picture:
        """The steps that begin in `window`, as finely as `columns` allow; those that do not fit are left out."""
        steps = tuple([step for step in run.steps if step.begin_us in window])
        for slice_ms in _SLICES_MS[:-1]:
            picture = cls(steps=steps, slice_us=1000.0 * slice_ms)
            if picture.columns <= columns:
                return picture
        picture = cls(steps=steps, slice_us=1000.0 * _SLICES_MS[-1])
        while picture.columns > columns:
            picture = cls(steps=picture.steps[:-1], slice_us=picture.slice_us)
        return picture

    @property
    def columns(self) -> int:
        """How wide it is."""
        return sum(self.gaps()) + sum(self.widths())

    def gaps(self) -> list[int]:
        """Columns before each step, in which no step runs."""
        before = [step.end_us for step in self.steps[:-1]]
        lengths = [step.begin_us - end for step, end in zip(self.steps[1:], before, strict=True)]
        return [0, *[round(length / self.slice_us) for length in lengths]][: len(self.steps)]

    def widths(self) -> list[int]:
        """Columns of each step."""
        return [max(1, round(step.length_us / self.slice_us)) for step in self.steps]

    def row(self, rank: int) -> str:
        """What one rank does, a glyph a column."""
        spans = zip(self.steps, self.gaps(), self.widths(), strict=True)
        return "".join([" " * gap + _cells(step, rank, width) for step, gap, width in spans])

    def lines(self, num_ranks: int, *, failed: int | None = None) -> list[Text]:
        """The whole picture: step numbers, a line a rank, how long the steps are, and what the glyphs mean.

        failed: the rank that ended the group after the last step of the run.
        """
        shown = self._ranks_shown(num_ranks, failed)
        lines = [Text(_labelled("step", self._labels([str(step.number) for step in self.steps])))]
        for rank in shown:
            after = "" if failed is None else (FAILED if rank == failed else WAIT) * _AFTER_FAILURE
            row = _coloured(self.row(rank) + after)
            lines.append(Text(f"rank {rank:<4} ") + row + Text(f" waits {self._waiting(rank):4.0%}"))
        if len(shown) < num_ranks:
            lines.append(Text(f"and {num_ranks - len(shown)} more ranks"))
        lengths = [f"{step.length_us / 1000:.0f}" for step in self.steps]
        lines.append(Text(_labelled("ms", self._labels(lengths))))
        lines.append(Text(f"{PROMPT} computes prompts   {DECODE} decodes   {WAIT} waits for others"))
        if failed is not None:
            lines[-1].append(f"   {FAILED} failed")
        lines[-1].append(f"   (a column: {self.slice_us / 1000:.0f} ms, or a step)")
        return lines

    def _labels(self, labels: Sequence[str]) -> str:
        """Each at the first column of its step, where it does not touch the one before it."""
        line, begin = "", 0
        for label, gap, width in zip(labels, self.gaps(), self.widths(), strict=True):
            begin += gap
            if begin >= len(line) + bool(line):
                line = line.ljust(begin) + label
            begin += width
        return line

    def _waiting(self, rank: int) -> float:
        """The share of the pictured steps in which a rank waits."""
        length = sum([step.length_us for step in self.steps])
        return sum([waiting_us(step, rank) for step in self.steps]) / length if length else 0.0

    def _ranks_shown(self, num_ranks: int, failed: int | None) -> list[int]:
        """All, or as many as have a place: the failed one, and those with most prompts."""
        prompt_us = [sum([step.prompt_us_R[rank] for step in self.steps]) for rank in range(num_ranks)]
        order = sorted(range(num_ranks), key=lambda rank: (rank != failed, -prompt_us[rank], rank))
        return sorted(order[:MAX_ROWS])


def waiting_us(step: StepRecord, rank: int) -> float:
    """How long a rank waits for others in a step: all the time if it has no token."""
    has_tokens = step.decode_R[rank] or step.prefill_R[rank]
    return max(0.0, step.length_us - step.busy_us_R[rank]) if has_tokens else step.length_us


def _cells(step: StepRecord, rank: int, width: int) -> str:
    """A step of one rank. Work that is there has a column if there are enough."""
    busy, prompts = 1 - waiting_us(step, rank) / step.length_us, step.prompt_us_R[rank] / step.length_us
    num_prompt = max(round(prompts * width), 1) if prompts else 0
    num_busy = max(round(busy * width), num_prompt, 1 if busy else 0)
    return PROMPT * num_prompt + DECODE * (num_busy - num_prompt) + WAIT * (width - num_busy)


def _labelled(name: str, line: str) -> str:
    return f"{name:<9} {line}"


def _coloured(row: str) -> Text:
    text = Text(row)
    for glyph, style in STYLES.items():
        text.highlight_regex(f"[{glyph}]+", style)
    return text
