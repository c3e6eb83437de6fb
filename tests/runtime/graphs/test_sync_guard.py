"""A warm step that takes what was to be there at the start, or that torch finds waiting, ends the run and is told why;
one that is not warm may do both."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime import CacheConfig, Engine, EngineConfig, SamplingParams
from runtime.graphs import sync_guard
from runtime.graphs.graph_config import GraphConfig
from runtime.graphs.sync_guard import WARM_AFTER, CompiledKernels, Counted, NoGuard, WarmGuard, guard_of
from runtime.loop.launcher import Launcher


class Device:
    """What torch, Triton and a transport would say."""

    def __init__(self) -> None:
        self.pieces, self.communicators = 7, 1
        self.modes: list[str] = []
        self.knobs = SimpleNamespace(jit_post_compile_hook=None)

    def guard(self) -> WarmGuard:
        ledgers = (
            Counted("pieces of the device's memory", lambda: self.pieces),
            CompiledKernels(self.knobs),
            Counted("communicators", lambda: self.communicators),
        )
        return WarmGuard(ledgers, set_mode=self.modes.append)

    def compile(self, name: str) -> None:
        """As Triton tells of it."""
        about: dict[str, Any] = {"key": "", "repr": "", "compile": {}, "is_manual_warmup": False}
        self.knobs.jit_post_compile_hook(fn=SimpleNamespace(name=name), already_compiled=False, **about)

    def take_all(self) -> None:
        self.pieces += 2
        self.communicators += 1
        self.compile("_norm_kernel")


def warm(device: Device) -> WarmGuard:
    guard = device.guard()
    for _ in range(WARM_AFTER):
        with guard.step():
            device.take_all()
    return guard


def launch(guard: WarmGuard, work: Callable[[], None]) -> None:
    with guard.step():
        work()


def test_the_first_steps_may_take_and_wait():
    device = Device()
    warm(device)
    assert device.modes == []


def test_a_warm_step_is_run_in_the_mode_that_raises_and_left_in_the_usual_one():
    device = Device()
    guard = warm(device)
    with guard.step():
        pass
    assert device.modes == ["error", "default"]
    with pytest.raises(ZeroDivisionError), guard.step():
        _ = 1 / 0
    assert device.modes[-1] == "default"


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (lambda device: setattr(device, "pieces", 20), "8 new pieces"),
        (lambda device: device.compile("_norm_kernel"), "kernel _norm_kernel compiled"),
        (lambda device: setattr(device, "communicators", 18), "1 new communicators"),
    ],
    ids=["memory", "kernel", "communicator"],
)
@pytest.mark.parametrize("inside", [True, False])
def test_what_a_warm_step_takes_or_what_was_taken_before_it_is_named(take, words: str, inside: bool):
    device = Device()
    guard = device.guard()
    for _ in range(WARM_AFTER):
        with guard.step():
            device.pieces, device.communicators = 12, 17
    if not inside:
        take(device)
    with pytest.raises(RuntimeError, match=f"launch {WARM_AFTER + 1} or what came before it took.*{words}"):
        launch(guard, (lambda: take(device)) if inside else (lambda: None))
    launch(guard, lambda: None)  # it is said once


def test_what_is_excused_is_passed_over_and_nothing_else_of_the_step_is():
    device = Device()
    guard = warm(device)
    with guard.step(), guard.excused():
        device.take_all()
    assert device.modes == ["error", "default", "error", "default"]

    def take() -> None:
        device.pieces += 1
        with guard.excused():
            device.take_all()

    with pytest.raises(RuntimeError, match=r"took, while warm: 1 new pieces of the device's memory$"):
        launch(guard, take)


def test_whoever_else_hears_of_kernels_still_does():
    device, heard = Device(), []
    device.knobs.jit_post_compile_hook = lambda **about: heard.append(about["fn"].name)
    device.guard()
    device.compile("_norm_kernel")
    assert heard == ["_norm_kernel"]


def test_a_cpu_is_not_guarded():
    for name, asked in (("cpu", True), ("cuda", False)):
        assert isinstance(guard_of(torch.device(name), debug_sync=asked, communicators=lambda: 1), NoGuard)


def test_an_engine_ends_with_the_name_of_what_a_warm_step_compiled(two_layers, monkeypatch):
    device = Device()
    monkeypatch.setitem(sync_guard.GUARDS, "cpu", lambda _: device.guard())
    config = EngineConfig(
        model=str(two_layers), load_format="dummy", cache=CacheConfig(num_blocks=4),
        graphs=GraphConfig(debug_sync=True),
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=WARM_AFTER + 4, ignore_eos=True)
    with Engine(config) as engine:
        [output] = engine.generate([[5, 6, 7]], params)
        assert len(output.token_ids) == WARM_AFTER + 4
    drawn = Launcher._sample

    def compiles(launcher: Launcher, ran: Any) -> Any:
        if int(ran.positions_B[0]) == 3 + WARM_AFTER:
            device.compile("_choose_kernel")
        return drawn(launcher, ran)

    monkeypatch.setattr(Launcher, "_sample", compiles)
    with Engine(config) as engine, pytest.raises(RuntimeError, match="while warm: kernel _choose_kernel compiled"):
        engine.generate([[5, 6, 7]], params)
