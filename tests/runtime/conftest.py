"""Fixtures of the engine's tests: the small random model, and the answer that every setting must give."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import RequestOutput
from tests.runtime.mixes import SMALL_V3, TWO_LAYERS, Ask, Settings, run_mix


@pytest.fixture(scope="session")
def small_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json only: weights are seeded dummies, equal for every number of ranks."""
    folder = tmp_path_factory.mktemp("small-v3")
    (folder / "config.json").write_text(json.dumps(SMALL_V3))
    return folder


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the smallest model."""
    folder = tmp_path_factory.mktemp("two-layers")
    (folder / "config.json").write_text(json.dumps(TWO_LAYERS))
    return folder


@pytest.fixture(scope="session")
def alone(small_v3: Path) -> Callable[[Ask], RequestOutput]:
    """The truth: the request alone on one rank, in one chunk, read step by step. Remembered by prompt and params."""
    known: dict[str, RequestOutput] = {}

    def answer(ask: Ask) -> RequestOutput:
        key = repr((ask.prompt, ask.params))
        if key not in known:
            [known[key]] = run_mix(small_v3, [replace(ask, priority=0)], Settings())
        return known[key]

    return answer
