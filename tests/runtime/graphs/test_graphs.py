"""Steps that are replayed decode what steps that are launched kernel by kernel do; what a graph would burn in shows.

There is no GPU: a pretend device records torch's operations and Triton's launches (`pretend_graphs`), and one rank
decodes by itself, with kernels in the interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ep import ExchangeConfig
from runtime import CacheConfig, Engine, EngineConfig, Request, RequestOutput, SamplingParams, SchedulerConfig
from runtime.graphs.graph_config import GraphConfig
from runtime.graphs.graphs import GraphRunner, Sizes
from runtime.graphs.runner import EagerRunner
from runtime.scheduling.scheduler import Drafter
from runtime.settings import runner_choice
from runtime.settings.settling import settle
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


def decode(config: EngineConfig, **how: Any) -> tuple[list[list[int]], Any]:
    """Tokens of the prompts, some greedy and some drawn, and the rank's runner."""
    outputs, runner = answers(config, prompt_logprobs=None, **how)
    return [list(output.token_ids) for output in outputs], runner


def answers(
    config: EngineConfig, *, drafter: Drafter | None = None, prompt_logprobs: int | None = 2
) -> tuple[list[RequestOutput], Any]:
    """The same in full. prompt_logprobs: asked for by the first request."""
    ranks = ThreadRanks(config, drafter=drafter, on_plan=None, on_progress=None)
    with Engine(config, ranks=ranks) as engine:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.7 * (index == 1), seed=3, max_tokens=3, ignore_eos=True)
            asked = replace(params, prompt_logprobs=prompt_logprobs if index == 0 else None)
            engine.submit(prompt, asked, request_id=str(index))
        outputs = {output.request_id: output for output in engine.run()}
    return [outputs[str(index)] for index in range(len(PROMPTS))], ranks.workers[0].launcher.runner


@pytest.fixture(scope="module")
def eager(small_v3: Path) -> list[RequestOutput]:
    """What is decoded kernel by kernel."""
    outputs, _ = answers(config(small_v3))
    return outputs


def test_replayed_steps_decode_what_launched_ones_do(small_v3, eager, graphs):
    tokens, runner = decode(config(small_v3))
    assert isinstance(runner, GraphRunner)
    assert tokens == [list(output.token_ids) for output in eager]
    assert runner.num_eager == 0
    assert graphs.num_graphs == 1 + 4  # a whole step, and the pieces of 16 tokens around three attentions


def test_steps_that_compute_a_prompt_whose_logprobs_are_asked_for_are_launched_and_give_them(
    small_v3, eager, graphs, monkeypatch
):
    monkeypatch.setattr(runner_choice, "sizes_of", lambda _: Sizes(decode=(4,), pieces=(4,)))
    chunks = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=3, max_model_len=64)
    found, runner = answers(config(small_v3, scheduler=chunks))
    assert isinstance(runner, GraphRunner)
    assert runner.num_eager == 2, "the first prompt's two chunks; all else is replayed"
    assert [list(output.token_ids) for output in found] == [list(output.token_ids) for output in eager]
    assert [output.prompt_logprobs is not None for output in found] == [True, False, False]
    for mine, theirs in zip(found[0].prompt_logprobs or (), eager[0].prompt_logprobs or (), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.token_id, list(mine.top)) == (theirs.token_id, list(theirs.top))
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_steps_with_drafts_and_those_of_another_level_are_launched(small_v3, eager, graphs, monkeypatch, level):
    monkeypatch.setattr(runner_choice, "sizes_of", lambda _: Sizes(decode=(4,), pieces=()))
    monkeypatch.setattr(runner_choice, "GraphRunner", partial(GraphRunner, level=level))

    def draft(request: Request) -> list[int]:
        return list(eager[int(request.id)].token_ids)[request.num_output :][:1]

    tokens, runner = decode(config(small_v3), drafter=None if level else draft)
    assert tokens == [list(output.token_ids) for output in eager]
    assert isinstance(runner, GraphRunner)
    assert runner.num_eager == 3 - (level == 0), "all three, or the prompts' and that with drafts"


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
