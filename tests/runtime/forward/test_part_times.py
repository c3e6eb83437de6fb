"""Where a step's time goes: parts that add up, on engines that decode as they do without being measured."""

from __future__ import annotations

import json
import time

import pytest

from dbo import DboConfig
from ep import Exchange
from runtime import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from runtime.failure.recorder import Unwatched
from runtime.failure.verdict import Phase
from runtime.forward.part_times import Part, PartTimer, TimedExchange, TimedRecorder
from runtime.loop.instruments import Instruments
from runtime.ranks.letters import LetterReader, WaveEndLetter, frames_of
from runtime.requests.measures import RankMeasures
from runtime.thread_ranks import ThreadRanks
from tests.runtime.mixes import SMALL_V3

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8], [6, 6, 6], [5] * 9, [7, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("parts")
    (path / "config.json").write_text(json.dumps(SMALL_V3))
    return str(path)


def decode(folder: str, instruments: Instruments | None, *, pages: int = 64, **settings):
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        dtype="float64",
        cache=CacheConfig(block_size=4, num_blocks=pages),
        scheduler=SchedulerConfig(max_num_seqs=8),
        **settings,
    )
    ranks = ThreadRanks(config, drafter=None, on_plan=None, on_progress=None, instruments=instruments)
    exchange = ranks.workers[0].decoder._exchange
    with Engine(config, ranks=ranks) as engine:
        tokens = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        return tokens, engine.stats(), exchange


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dbo", ["off", "on"])
def test_measuring_changes_no_token_and_its_parts_are_of_the_steps_that_ran(folder: str, dbo: str):
    overlap = DboConfig(dbo=dbo, dbo_decode_token_threshold=1, dbo_prefill_token_threshold=1)  # type: ignore[arg-type]
    plain, unmeasured, exchange = decode(folder, None, ranks=2, overlap=overlap)
    assert [rank.measures for rank in unmeasured.ranks] == [None, None]
    assert type(exchange) is Exchange
    tokens, stats, exchange = decode(folder, Instruments(parts=True), ranks=2, overlap=overlap)
    assert tokens == plain
    assert isinstance(exchange, TimedExchange)
    for rank in stats.ranks:
        measures = rank.measures
        assert measures is not None
        assert [step.step for step in measures.steps] == list(range(rank.steps)), "every step, none twice"
        assert sum(step.decode_tokens + step.prefill_tokens for step in measures.steps) == rank.computed_tokens
        assert sum(step.tracks > 1 for step in measures.steps) == rank.cut_steps
        assert (rank.cut_steps > 0) == (dbo == "on")
        for step in measures.steps:
            assert all(wall >= 0 for wall in step.wall_ns)
            assert all(step.wall_ns[part] > 0 for part in Part if part is not Part.MOVE)
            assert 0 <= step.exposed_ns <= step.wall_ns[Part.DISPATCH] + step.wall_ns[Part.COMBINE]
    first = stats.ranks[0].measures
    assert first is not None
    for earlier, later in zip(first.steps, first.steps[1:], strict=False):
        assert later.begin_ns - earlier.begin_ns == earlier.total_ns, "they add up"


@pytest.mark.timeout(120)
def test_expert_counts_are_all_pairs_of_all_tokens(folder: str):
    _, stats, _ = decode(folder, Instruments(parts=True), ranks=2)
    for rank in stats.ranks:
        assert rank.measures is not None
        sums = {sum(layer) for layer in rank.measures.counts_LE}
        assert sums == {rank.computed_tokens * SMALL_V3["num_experts_per_tok"]}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pages", [64, 13])
def test_filled_caches_leave_nothing_but_decodes_even_when_requests_are_preempted(folder: str, pages: int):
    tokens, stats, _ = decode(folder, Instruments(parts=True, filled=True), pages=pages)
    [rank] = stats.ranks
    assert rank.measures is not None
    assert [len(each) for each in tokens] == [GREEDY.max_tokens] * len(PROMPTS)
    assert all(step.prefill_tokens == 0 for step in rank.measures.steps)
    assert (rank.preemptions > 0) == (pages == 13)
    assert rank.measures.steps[0].context_tokens == sum(map(len, PROMPTS[: rank.measures.steps[0].rows]))
    plain, _, _ = decode(folder, Instruments(parts=True))
    assert tokens != plain, "random latents give other tokens"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("way", "part"), [("dispatch", Part.DISPATCH), ("combine", Part.COMBINE)])
def test_packing_rows_is_the_exchanges_time(folder: str, monkeypatch: pytest.MonkeyPatch, way: str, part: Part):
    plain = getattr(Exchange, way)

    def slow(self: Exchange, *args, **words):
        _work(0.004)
        return plain(self, *args, **words)

    monkeypatch.setattr(Exchange, way, slow)
    _, stats, _ = decode(folder, Instruments(parts=True))
    measures = stats.ranks[0].measures
    assert measures is not None
    assert all(step.cpu_ns[part] >= 2 * 0.004e9 for step in measures.steps), "two layers have experts"


def test_time_belongs_to_the_part_entered_last_and_sleeping_costs_no_processor():
    timer = PartTimer()
    recorder = TimedRecorder(Unwatched(), timer)
    recorder.stamp(Phase.PROPOSE, 0)
    timer.ran(0, None, tracks=1)
    timer.enter(Part.ATTENTION)
    _work(0.02)
    timer.enter(Part.DISPATCH)
    recorder.wait()
    time.sleep(0.03)
    recorder.go_on()
    recorder.stamp(Phase.VOTE, 1)
    recorder.wait()
    time.sleep(0.01)
    recorder.go_on()
    recorder.stamp(Phase.SAMPLE, 1)
    recorder.stamp(Phase.PROPOSE, 1)
    recorder.stamp(Phase.PROPOSE, 2)
    [step] = timer.measures().steps
    assert step.cpu_ns[Part.ATTENTION] >= 0.02e9
    assert step.wall_ns[Part.DISPATCH] >= 0.03e9
    assert step.cpu_ns[Part.DISPATCH] < 0.01e9
    assert 0.03e9 <= step.exposed_ns < step.wall_ns[Part.DISPATCH] + 0.005e9, "the beat is no exchange"
    assert step.wall_ns[Part.BEAT] >= 0.01e9
    assert step.wall_ns[Part.EXPERTS] == 0


def _work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.timeout(120)
def test_measures_travel_to_the_front_as_they_are(folder: str):
    _, stats, _ = decode(folder, Instruments(parts=True))
    letter = WaveEndLetter(stats.ranks[0])
    reader = LetterReader.at_front()
    found = [reader.take(frame) for frame in frames_of(letter)][-1]
    assert isinstance(found, WaveEndLetter)
    assert found.stats.measures == stats.ranks[0].measures
    assert isinstance(found.stats.measures, RankMeasures)
