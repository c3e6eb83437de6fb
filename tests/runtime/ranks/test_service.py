"""What a rank does for a service between steps: reports, an emptied cache, a trace of some steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ep import Kind, Tag, run_ranks
from runtime import SamplingParams
from runtime.loop.profiling import SwitchedTimeline, SwitchedTransport
from runtime.loop.ranks import Admit
from runtime.ranks import service
from runtime.ranks.service import Service
from runtime.ranks.wire import (
    FlushedLetter,
    FlushLetter,
    ProfileLetter,
    ReportLetter,
    StopProfileLetter,
    TraceLetter,
)
from runtime.requests.kv_log import KvLetter, KvLog
from runtime.requests.request import Request
from runtime.thread_ranks import ThreadRanks
from tests.runtime.mixes import Settings, engine_config

pytestmark = pytest.mark.timeout(120)


class Rank:
    """A rank on the small model with a service beside it; `said` is what that told."""

    def __init__(self, model: Path) -> None:
        self.timeline, self.log = SwitchedTimeline(), KvLog()
        settings = Settings(ranks=1, block_size=4, num_blocks=16, enable_prefix_caching=True)
        self.ranks = ThreadRanks(
            engine_config(model, settings),
            drafter=None,
            on_plan=None,
            on_progress=None,
            trace=lambda transport: SwitchedTransport(transport, self.timeline),
            timeline=lambda _: self.timeline,
        )
        [self.worker] = self.ranks.workers
        self.worker.prefix.log = self.log
        self.said: list = []
        self.service = Service(self.worker, log=self.log, timeline=self.timeline, say=self.said.append)

    def decode(self, prompt: tuple[int, ...], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.ranks.send(0, Admit(request=Request(id=str(len(self.said)), prompt=prompt, params=params, arrival=0)))
        for _ in self.ranks.wave():
            self.service.turn()

    def close(self) -> None:
        self.ranks.close(RuntimeError("the test is over"))


@pytest.fixture
def rank(small_v3: Path):
    rank = Rank(small_v3)
    yield rank
    rank.close()


def test_reports_come_now_and_then_and_not_every_step(rank: Rank, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(service.time, "monotonic", lambda: now[0])
    for seconds in (0.0, 0.1, 0.1, 0.1):
        now[0] += seconds
        rank.service.turn()
    reports = [letter for letter in rank.said if isinstance(letter, ReportLetter)]
    assert [(letter.stats.rank, letter.stats.free_pages) for letter in reports] == [(0, 16)] * 2


def test_what_the_cache_holds_is_told_and_a_flush_forgets_it(rank: Rank):
    rank.decode(tuple(range(2, 12)), 3)
    rank.service.tell_cache()
    stored = [block for letter in rank.said if isinstance(letter, KvLetter) for block in letter.stored]
    assert [block.token_ids for block in stored][:2] == [(2, 3, 4, 5), (6, 7, 8, 9)]
    rank.said.clear()
    rank.service.obey(FlushLetter())
    [cleared, flushed] = rank.said
    assert (cleared.cleared, cleared.stored, flushed) == (True, (), FlushedLetter())
    assert rank.worker.pool.num_cached == 0


def test_a_trace_holds_as_many_steps_as_were_asked_for(rank: Rank, tmp_path: Path):
    rank.decode((5, 6), 4)
    rank.service.obey(ProfileLetter(3, str(tmp_path / "t.json")))
    rank.decode((5, 7), 8)
    [letter] = [letter for letter in rank.said if isinstance(letter, TraceLetter)]
    assert (letter.path, letter.failed) == (str(tmp_path / "t.json"), False)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in events) == 3
    assert not rank.timeline.spans


def test_a_trace_that_is_stopped_early_is_written_as_far_as_it_came(rank: Rank, tmp_path: Path):
    rank.service.obey(StopProfileLetter())
    rank.service.obey(ProfileLetter(1000, str(tmp_path / "t.json")))
    rank.decode((5, 6), 4)
    rank.service.obey(StopProfileLetter())
    first, second = [letter for letter in rank.said if isinstance(letter, TraceLetter)]
    assert (first.failed, second.failed) == (True, False)
    assert (tmp_path / "t.json").exists()


def test_a_trace_that_cannot_be_written_is_told_and_harms_nothing(rank: Rank, tmp_path: Path):
    rank.service.obey(ProfileLetter(1, str(tmp_path / "missing" / "t.json")))
    rank.decode((5, 6), 4)
    [letter] = [letter for letter in rank.said if isinstance(letter, TraceLetter)]
    assert letter.failed
    assert "No such file" in letter.line


def test_exchanges_are_noted_only_while_the_timeline_is_on():
    def exchange(transport) -> int:
        timeline = SwitchedTimeline()
        switched = SwitchedTransport(transport, timeline)
        for turn in range(2):
            rows = torch.arange(2)
            tag = Tag(step=turn, layer=0, track=0, round=0, kind=Kind.DISPATCH)
            got = switched.all_to_all(
                torch.empty(2, dtype=rows.dtype), rows, recv_splits=(1, 1), send_splits=(1, 1), tag=tag
            )
            assert got.wait().tolist() == [transport.rank] * 2
            if turn == 0:
                assert not timeline.spans
                timeline.start(1)
        return len(timeline.spans)

    assert run_ranks(2, exchange) == [2, 2]
