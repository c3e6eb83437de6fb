"""Steps that are replayed decode what steps that are launched kernel by kernel do; what a graph would burn in shows.

There is no GPU: a pretend device records torch's operations and Triton's launches (`pretend_graphs`), and one rank
decodes by itself, with kernels in the interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ep import ExchangeConfig
from runtime import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig, runner_choice
from runtime.graph_config import GraphConfig
from runtime.graphs import GraphRunner, Sizes
from runtime.runner import EagerRunner
from runtime.settling import settle
from runtime.thread_ranks import ThreadRanks
from tests.runtime.pretend_graphs import HostTouched, PretendGraphs

# Rows of padding begin as whatever lies in memory, which may overflow; it goes nowhere.
WHATEVER = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120), WHATEVER]

PROMPTS = ([5, 6, 7, 8, 9], list(range(20, 28)), [3])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PretendGraphs:
    """A CPU that has graphs."""
    device = PretendGraphs()
    monkeypatch.setitem(runner_choice.GRAPH_DEVICES, "cpu", lambda _: device)
    monkeypatch.setattr(runner_choice, "sizes_of", lambda _: Sizes(decode=(4,), pieces=(16,)))
    return device


def config(model: Path, **changes: Any) -> EngineConfig:
    usual = {
        "model": str(model), "dtype": "float32", "load_format": "dummy", "ops": "triton", "async_depth": 1,
        "cache": CacheConfig(block_size=16, num_blocks=24),
        "scheduler": SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64),
        "exchange": ExchangeConfig(exchange="bounded"), "graphs": GraphConfig(cuda_graph_sizes=(4,)),
    }  # fmt: skip
    return EngineConfig(**(usual | changes))  # type: ignore[arg-type]


def decode(config: EngineConfig) -> tuple[list[list[int]], Any]:
    """Tokens of the prompts, some greedy and some drawn, and the rank's runner."""
    ranks = ThreadRanks(config, drafter=None, on_plan=None, on_progress=None)
    with Engine(config, ranks=ranks) as engine:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.7 * (index == 1), seed=3, max_tokens=3, ignore_eos=True)
            engine.submit(prompt, params, request_id=str(index))
        outputs = {output.request_id: list(output.token_ids) for output in engine.run()}
    return [outputs[str(index)] for index in range(len(PROMPTS))], ranks.workers[0].launcher.runner


@pytest.fixture(scope="module")
def eager(small_v3: Path) -> list[list[int]]:
    tokens, _ = decode(config(small_v3))
    return tokens


def test_replayed_steps_decode_what_launched_ones_do(small_v3, eager, graphs):
    tokens, runner = decode(config(small_v3))
    assert isinstance(runner, GraphRunner)
    assert tokens == eager
    assert runner.num_eager == 0
    assert graphs.num_graphs == 1 + 4  # a whole step, and the pieces of 16 tokens around three attentions


def test_a_step_in_which_the_host_reads_a_value_cannot_be_recorded(small_v3, graphs, monkeypatch):
    plain = EagerRunner.drive

    def asks(runner: EagerRunner, tracks: Any, terms: Any, *, step: int) -> Any:
        out = plain(runner, tracks, terms, step=step)
        assert out.counts_LE.sum().item() >= 0
        return out

    monkeypatch.setattr(EagerRunner, "drive", asks)
    monkeypatch.setattr(runner_choice, "sizes_of", lambda _: Sizes(decode=(1,), pieces=()))
    with pytest.raises(HostTouched, match="the host reads a tensor in a captured step: item"):
        ThreadRanks(config(small_v3), drafter=None, on_plan=None, on_progress=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"graphs": GraphConfig(enforce_eager=True)}, "--enforce-eager"),
        ({"ops": "reference"}, "ops are reference"),
        ({"exchange": ExchangeConfig(exchange="exact")}, "the exchange is exact"),
    ],
)
def test_what_keeps_steps_from_being_captured_is_said(small_v3, graphs, changes, words):
    assert words in runner_choice.why_eager(settle(config(small_v3, **changes)), ranks_here=1)
    assert bool(words) == bool(runner_choice.why_eager(settle(config(small_v3, **changes)), ranks_here=1))


def test_a_cpu_captures_nothing(small_v3):
    assert runner_choice.why_eager(settle(config(small_v3)), ranks_here=1) == "a cpu has no graphs"
