"""Steps that are replayed decode what steps that are launched kernel by kernel do; what a graph would burn in shows.

There is no GPU: pretend devices record torch's operations, Triton's launches and exchanges (`pretend_graphs`), and
ranks are threads, with kernels in the interpreter. What is right is what the reference ops decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dbo import DboConfig
from ep import Exchange, ExchangeConfig, Transport
from ep.capacity import CapacityPlan
from runtime import (
    CacheConfig,
    Engine,
    EngineConfig,
    Request,
    RequestOutput,
    SamplingParams,
    SchedulerConfig,
)
from runtime.forward import device_time
from runtime.graphs.graph_config import GraphConfig, Sizes, has_prompts
from runtime.graphs.graphs import WhyEager
from runtime.graphs.runner import EagerRunner, RunTally
from runtime.loop import instruments
from runtime.requests.telemetry import RankStats
from runtime.scheduling.heartbeat import HeartbeatState
from runtime.scheduling.rerun import Overflows
from runtime.scheduling.scheduler import Drafter
from runtime.settings import graph_plan, runner_choice
from runtime.settings.settling import settle
from runtime.thread_ranks import ThreadRanks
from tests.runtime.pretend_graphs import HostTouched, PretendGraphs

# Rows of padding begin as whatever lies in memory, which may overflow; it goes nowhere.
WHATEVER = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120), WHATEVER]

PROMPTS = ([5, 6, 7, 8], [20, 21], [3])
CUT = DboConfig(dbo="on", dbo_decode_token_threshold=1, dbo_prefill_token_threshold=1)


class Machine:
    """CPUs that have graphs, one a rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.devices = [PretendGraphs() for _ in range(2)]
        self._unused: Iterator[PretendGraphs] = iter(self.devices)
        self._patch = patch
        patch.setitem(runner_choice.GRAPH_DEVICES, "cpu", lambda _: next(self._unused))
        self.records(decode=(4,), pieces=(8,))

    def records(self, **sizes: Any) -> None:
        for module in (runner_choice, graph_plan):
            self._patch.setattr(module, "sizes_of", lambda *_, **__: Sizes(**sizes))

    def has_clocks(self, call_ns: Sequence[int]) -> None:
        """Each rank's device takes so long for each call of a replay."""
        for device, each in zip(self.devices, call_ns, strict=True):
            device.call_ns = each
        clocks = iter(self.devices)
        self._patch.setitem(device_time.DEVICE_CLOCKS, "cpu", lambda: next(clocks))

    def carry(self, transport: Transport) -> Transport:
        """Of a rank, over its device."""
        return self.devices[transport.rank].carry(transport)

    def has_threads(self) -> None:
        """Ranks that are threads may record: their devices and what is between them are not the threads'."""
        self._patch.setattr(runner_choice, "why_eager", lambda *_, **__: "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def config(model: Path, **changes: Any) -> EngineConfig:
    usual = {
        "model": str(model), "dtype": "float32", "load_format": "dummy", "ops": "triton", "async_depth": 1,
        "cache": CacheConfig(block_size=16, num_blocks=24),
        "scheduler": SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64),
        "exchange": ExchangeConfig(exchange="bounded"), "graphs": GraphConfig(cuda_graph_sizes=(4,)),
    }  # fmt: skip
    return EngineConfig(**(usual | changes))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What came of the prompts, and of rank 0's steps."""

    outputs: list[RequestOutput]
    tally: RunTally
    stats: tuple[RankStats, ...]

    @property
    def tokens(self) -> list[list[int]]:
        return [list(output.token_ids) for output in self.outputs]


def decode(
    config: EngineConfig,
    *,
    max_tokens: int = 3,
    machine: Machine | None = None,
    drafter: Drafter | None = None,
    prompt_logprobs: int | None = None,
) -> Decoded:
    """Some greedy, some drawn. prompt_logprobs: asked for by the first request."""
    trace = (lambda transport: transport) if machine is None else machine.carry
    ranks = ThreadRanks(config, drafter=drafter, on_plan=None, on_progress=None, trace=trace)
    with Engine(config, ranks=ranks) as engine:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.7 * (index == 1), seed=3, max_tokens=max_tokens, ignore_eos=True)
            asked = replace(params, prompt_logprobs=prompt_logprobs if index == 0 else None)
            engine.submit(prompt, asked, request_id=str(index))
        outputs = {output.request_id: output for output in engine.run()}
        stats = engine.stats().ranks
    found = [outputs[str(index)] for index in range(len(PROMPTS))]
    return Decoded(outputs=found, tally=ranks.workers[0].launcher.runner.tally, stats=stats)


@pytest.fixture(scope="module")
def reference(two_layers: Path) -> Decoded:
    """What the reference ops decode, prompts' log-probabilities with it."""
    return decode(config(two_layers, ops="reference"), prompt_logprobs=2)


@pytest.fixture(scope="module")
def replayed(two_layers: Path) -> tuple[Decoded, PretendGraphs]:
    """The same from graphs, and the device that had them."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        return decode(config(two_layers), prompt_logprobs=2), machine.devices[0]


def test_replayed_steps_decode_what_the_reference_does_and_say_how_likely_prompts_are(reference, replayed):
    found, device = replayed
    assert found.tokens == reference.tokens
    assert (found.tally.replayed, found.tally.words) == (found.stats[0].steps, "")
    assert device.num_graphs == 1 + 3  # a whole step, and pieces around two attentions
    for mine, theirs in zip(found.outputs[0].prompt_logprobs or (), reference.outputs[0].prompt_logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.token_id, list(mine.top)) == (theirs.token_id, list(theirs.top))
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_what_graphs_hold_is_planned(two_layers, replayed, machine):
    planned, held = settle(config(two_layers)).plan.workspaces.graphs, replayed[1].most_bytes
    assert held <= planned <= 4 * held


@pytest.mark.parametrize("cut", [False, True])
def test_what_graphs_hold_in_several_rounds_and_tracks_is_planned(two_layers, machine, cut: bool):
    """Of which only one has its experts' results at a time."""
    machine.records(decode=(4,), pieces=() if cut else (32,), cut_pieces=(16,) if cut else (), tracks=1 + cut)
    machine.has_threads()
    exchange = ExchangeConfig(exchange="bounded", round_tokens=8)
    settled = config(two_layers, ranks=2, exchange=exchange, **({"overlap": CUT} if cut else {}))
    ThreadRanks(settled, drafter=None, on_plan=None, on_progress=None, trace=machine.carry).close(ValueError("seen"))
    planned, held = settle(settled).plan.workspaces.graphs, machine.devices[0].most_bytes
    assert held <= planned <= 4 * held


def test_steps_with_drafts_are_replayed_and_those_with_too_many_launched(two_layers, reference, machine):
    machine.records(decode=(4, 8), pieces=(), row_tokens=2)

    def draft(request: Request) -> list[int]:
        """A right one, but for the last request a wrong one, and for the first one more than is recorded."""
        index = int(request.id)
        right = reference.tokens[index][request.num_output :]
        return right[: 2 - (index > 0)] if index < 2 else [(token + 1) % 160 for token in right[:1]]

    found = decode(config(two_layers), drafter=draft, max_tokens=4)
    assert [tokens[:3] for tokens in found.tokens] == reference.tokens
    assert found.tally.launched == {WhyEager.LARGE: 1, WhyEager.DRAFTS: 1}, "prompts, of which nothing is recorded"
    assert found.tally.replayed >= 1
    assert found.stats[0].launched_steps == "1 larger than any captured, 1 more drafts a row than captured"


def test_what_was_recorded_is_recorded_again_when_capacities_are_raised(two_layers, reference, machine, monkeypatch):
    raised = HeartbeatState(overflows=Overflows(level=2))
    monkeypatch.setattr(HeartbeatState, "start", lambda *_, **__: raised)
    found = decode(config(two_layers), max_tokens=2)
    assert found.tokens == [tokens[:2] for tokens in reference.tokens]
    assert found.tally.words == ""
    assert machine.devices[0].num_graphs == 2 * (1 + 3)


@dataclass(frozen=True, kw_only=True)
class TwoTracks:
    """The same on two ranks whose steps are cut in two, launched and replayed; the second device is slower."""

    launched: Decoded
    replayed: Decoded


@pytest.fixture(scope="module", params=["abreast", pytest.param("staggered", marks=pytest.mark.soak)])
def two_tracks(two_layers: Path, request: pytest.FixtureRequest) -> TwoTracks:
    abreast = request.param == "abreast"
    cut = config(two_layers, ranks=2, overlap=replace(CUT, dbo_order=request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerRunner, "bucket", lambda _, plan: 4 if has_prompts(plan) else 2)
        ops = "reference" if abreast else "triton"
        launched = decode(replace(cut, ops=ops, graphs=GraphConfig(enforce_eager=True)))
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        machine.has_threads()
        machine.has_clocks([1_000_000, 5_000_000])
        machine.records(decode=(), pieces=(), cut_decode=(2,), cut_pieces=(4,), tracks=2)
        return TwoTracks(launched=launched, replayed=decode(cut, machine=machine))


def test_two_ranks_of_two_tracks_replay_what_they_launch(reference, two_tracks):
    assert two_tracks.launched.tally == RunTally()
    assert two_tracks.replayed.tokens == two_tracks.launched.tokens == reference.tokens
    for rank in two_tracks.replayed.stats:
        assert (rank.replayed_steps, rank.launched_steps, rank.cut_steps) == (rank.steps, "", rank.steps)


def test_replayed_steps_count_as_many_bytes_as_launched_ones(two_tracks):
    sent = [
        [(rank.network_bytes, rank.node_bytes) for rank in run.stats]
        for run in (two_tracks.launched, two_tracks.replayed)
    ]
    assert sent[0] == sent[1]
    assert all(node for _, node in sent[0])


def test_a_slow_device_shows_though_its_steps_are_replayed(two_tracks):
    """The host's clock says nothing of it: what the pretend devices do takes no time of their own."""
    first, second = two_tracks.replayed.stats
    assert first.slow_steps == 0
    assert second.slow_steps > 0


def test_replays_that_leave_rows_behind_are_run_again_exactly(two_layers, reference, machine, monkeypatch):
    def cramped(*args: Any, **words: Any) -> Exchange:
        return Exchange(*args, **(words | {"plan": CapacityPlan.fixed(1)}))

    monkeypatch.setattr(instruments, "Exchange", cramped)
    machine.has_threads()
    machine.records(decode=(2,), pieces=(8,))
    found = decode(config(two_layers, ranks=2), machine=machine, max_tokens=2)
    assert found.tokens == [tokens[:2] for tokens in reference.tokens]
    assert all(rank.rerun_steps for rank in found.stats)
    assert found.tally.launched == {WhyEager.EXACT: found.stats[0].rerun_steps}
    assert sum(rank.overflow_steps for rank in found.stats)


def test_a_step_in_which_the_host_reads_a_value_cannot_be_recorded(two_layers, machine, monkeypatch):
    plain = EagerRunner.drive

    def asks(runner: EagerRunner, tracks: Any, terms: Any, *, step: int) -> Any:
        out = plain(runner, tracks, terms, step=step)
        assert out.counts_LE.sum().item() >= 0
        return out

    monkeypatch.setattr(EagerRunner, "drive", asks)
    machine.records(decode=(1,), pieces=())
    with pytest.raises(HostTouched, match="the host reads a tensor in a captured step: item"):
        ThreadRanks(config(two_layers), drafter=None, on_plan=None, on_progress=None)


def why_eager(config: EngineConfig) -> str:
    settled = settle(config)
    return graph_plan.why_eager(settled.config, settled.model, settled.device, ranks_here=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"graphs": GraphConfig(enforce_eager=True)}, "--enforce-eager"),
        ({"ops": "reference"}, "ops are reference"),
        ({"exchange": ExchangeConfig(exchange="exact")}, "the exchange is exact"),
    ],
)
def test_what_keeps_steps_from_being_captured_is_said(two_layers, machine, changes, words):
    found = why_eager(config(two_layers, **changes))
    assert words in found
    assert bool(words) == bool(found)


def test_a_cpu_captures_nothing(two_layers):
    assert why_eager(config(two_layers)) == "a cpu has no graphs"
