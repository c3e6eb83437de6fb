"""What a rank puts on its page while it steps: chosen at start, and nothing where nobody is to look.

Knows a worker's parts by their counters; does not know who reads. A step costs some microseconds; loads of experts are
looked at every HEAT_STEPS steps, and taken from the device without waiting for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbo import Choice
from eplb import ExpertLoad

from .show_page import PageState, ShowPage

if TYPE_CHECKING:
    from .worker import Worker

HEAT_STEPS, FIRST_HEAT = 64, 8


class NotShown:
    """Shows nothing."""

    def stepped(self, worker: Worker) -> None:
        """The worker has made a step."""

    def rested(self) -> None:
        """The wave is over."""

    def noted(self, text: str) -> None:
        """The ranks said something of their group."""


NOT_SHOWN = NotShown()


class Showing(NotShown):
    """Writes one rank's page."""

    def __init__(self, page: ShowPage) -> None:
        self._page = page
        self._since_ns = time.monotonic_ns()
        self._waited_ns = 0
        self._steps = 0
        self._counts_E: Tensor | None = None

    def stepped(self, worker: Worker) -> None:
        counters, scheduler, cadence = worker.counters, worker.scheduler, worker.state.cadence
        interval = cadence.config.prefill_schedule_interval
        self._page.write(
            {
                "state": PageState.STEPS,
                "beat_ns": time.monotonic_ns(),
                "step": worker.sequence - 1,
                "steps": counters.steps,
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "pages": worker.pool.num_pages,
                "free_pages": worker.pool.num_free,
                "computed_tokens": counters.computed_tokens,
                "generated_tokens": scheduler.num_generated,
                "finished": scheduler.num_ended,
                "preemptions": scheduler.num_preemptions,
                "cut_steps": worker.state.overlap.counts.get(Choice.CUT, 0),
                "rerun_steps": counters.rerun_steps,
                "overflow_steps": worker.in_flight.num_overflows,
                "rebalances": worker.experts.stats.rebalances,
                "deferred_steps": cadence.tally.deferred_steps,
                "slow_steps": worker.stragglers.slow_steps_of(worker.transport.rank),
                "degraded": int(worker.transport.rank in worker.stragglers.degraded),
                "mean_pairs": int(counters.mean_pairs),
                "most_pairs": counters.most_pairs,
                "prefill_interval": 0 if interval == "auto" else interval,
            }
        )
        self._show_times(worker)
        if counters.steps % HEAT_STEPS == FIRST_HEAT:
            self._show_heat(worker.experts.load)

    def rested(self) -> None:
        self._page.write({"state": PageState.IDLE, "beat_ns": time.monotonic_ns(), "running": 0})

    def noted(self, text: str) -> None:
        self._page.write_note(text)

    def _show_times(self, worker: Worker) -> None:
        """How long the step was; a beat in which nothing was launched leaves the last step's times."""
        now_ns, waited_ns = time.monotonic_ns(), worker.recorder.waited_ns
        if worker.counters.steps > self._steps:
            self._steps = worker.counters.steps
            self._page.write(
                {
                    "step_us": (now_ns - self._since_ns) // 1000,
                    "own_us": worker.took.own_us,
                    "exchange_us": worker.took.waited_us,
                    "beat_us": max((waited_ns - self._waited_ns) // 1000 - worker.took.waited_us, 0),
                }
            )
        self._since_ns, self._waited_ns = now_ns, waited_ns

    def _show_heat(self, load: ExpertLoad) -> None:
        """The counts that were on their way since the last call; a new copy is sent off."""
        if self._counts_E is not None:
            self._page.write_heat(self._counts_E.tolist())
        counts_E = load.counts_YE.sum(dim=0)
        if not counts_E.numel():
            return
        if counts_E.device.type == "cpu":
            self._page.write_heat(counts_E.tolist())
            return
        self._counts_E = torch.empty(counts_E.shape, dtype=torch.int64, pin_memory=True)
        self._counts_E.copy_(counts_E, non_blocking=True)
