"""A rank's phases as ranges that a profiler draws: on a GPU NVTX's, on a CPU none.

The recorder is told every phase anyway, so one wrapper around it is enough. Has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..failure.recorder import Recorder
from ..failure.verdict import Phase


class RangedRecorder:
    """A recorder that ends one range and begins the next with each phase; see `recorder.Recorder`."""

    def __init__(self, recorder: Recorder, *, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self._recorder = recorder
        self._push = push
        self._pop = pop
        self._begun = False

    @property
    def waited_ns(self) -> int:
        return self._recorder.waited_ns

    def stamp(self, phase: Phase, step: int, layer: int = 0) -> None:
        """A range is named after its phase, its step, and its layer where there is one."""
        if self._begun:
            self._pop()
        self._push(f"{phase.name.lower()} {step}" + (f" layer {layer}" if layer else ""))
        self._begun = True
        self._recorder.stamp(phase, step, layer)

    def wait(self) -> None:
        self._recorder.wait()

    def go_on(self) -> None:
        self._recorder.go_on()

    def predict(self, seconds: float) -> None:
        self._recorder.predict(seconds)


def _as_it_is(recorder: Recorder) -> Recorder:
    return recorder


def _with_nvtx(recorder: Recorder) -> Recorder:
    return RangedRecorder(recorder, push=torch.cuda.nvtx.range_push, pop=torch.cuda.nvtx.range_pop)


RANGES: dict[str, Callable[[Recorder], Recorder]] = {"cpu": _as_it_is, "cuda": _with_nvtx}
"""By the kind of device."""
