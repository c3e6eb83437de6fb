"""Steps cut into tracks answer as whole ones do, on any number of ranks, with empty tracks and with one-token ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import runtime.forward.decoder
from attention_mla import attention_ops
from dbo import Choice, OverlapState, most_tokens
from dbo.policy import DboConfig, Need, Taken
from moe import moe_ops
from runtime import Engine, EngineConfig, SamplingParams
from runtime.forward.tracks import cut_rows
from runtime.graphs.runner import EagerRunner
from runtime.requests.request import Request
from runtime.requests.rows import Proposal, Row, Rows
from runtime.scheduling.heartbeat import HeartbeatState, decide
from runtime.scheduling.overlap import comm_share, longest_rows, need_of, taken_of, uncut_words
from runtime.scheduling.votes import Vote
from runtime.weights.hardware import Hardware
from tests.runtime.mixes import Ask, Settings, engine_config, run_mix
from tests.runtime.test_invariance import check, mixed_asks
from tests.runtime.tight import be_cramped

BASE = Settings(num_blocks=200, block_size=16, enable_prefix_caching=True, async_depth=1)


@pytest.mark.parametrize(
    ("ranks", "tracks", "track_order"),
    [(1, 2, "abreast"), (2, 3, "abreast"), (4, 2, "staggered"), (8, 3, "staggered"), (8, 2, "abreast")],
)
def test_no_number_of_tracks_changes_an_answer(small_v3: Path, alone, ranks: int, tracks: int, track_order: str):
    chosen = replace(BASE, ranks=ranks, tracks=tracks, track_order=track_order, max_num_batched_tokens=40)
    check(small_v3, mixed_asks(1, 10), chosen, alone)


@pytest.mark.parametrize("tracks", [2, 3])
def test_one_request_on_four_ranks_leaves_most_tracks_empty(small_v3: Path, alone, tracks: int):
    check(small_v3, mixed_asks(6, 1), replace(BASE, ranks=4, tracks=tracks), alone)


def test_rounds_of_single_tokens_are_cut_too(small_v3: Path, alone):
    chosen = replace(BASE, ranks=3, tracks=2, round_tokens=1, max_num_batched_tokens=7, async_depth=0)
    check(small_v3, mixed_asks(2, 6), chosen, alone)


def test_cut_steps_that_overflow_are_run_again(small_v3: Path, alone, monkeypatch: pytest.MonkeyPatch):
    exchanges = be_cramped(monkeypatch, 2)
    check(small_v3, mixed_asks(4, 8), replace(BASE, ranks=4, tracks=2), alone)
    assert any(exchange.steps for exchange in exchanges)


class Seen:
    """The tracks of every launch of every rank, by step: rows of each, and what all ranks agreed a track may have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[int, list[list[int]]] = {}
        self.bounds: dict[int, int] = {}
        plain_drive = EagerRunner.drive

        def drive(runner, tracks, terms, *, step: int, prompt_rows=None):
            self.tokens.setdefault(step, []).append([view.num_tokens for view, _ in tracks])
            self.bounds[step] = terms.bucket
            return plain_drive(runner, tracks, terms, step=step, prompt_rows=prompt_rows)

        monkeypatch.setattr(EagerRunner, "drive", drive)


def test_all_ranks_cut_every_step_into_as_many_tracks_none_fuller_than_agreed(
    small_v3: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = Seen(monkeypatch)
    asks = [Ask(prompt=ask.prompt, params=ask.params) for ask in mixed_asks(8, 9)]
    with Engine(engine_config(small_v3, replace(BASE, ranks=4, tracks=2, max_num_batched_tokens=50))) as engine:
        for index, ask in enumerate(asks):
            engine.submit(ask.prompt, ask.params, request_id=str(index))
        list(engine.run())
        stats = engine.stats().ranks
    assert {len(ranks) for ranks in seen.tokens.values()} == {4}
    assert {len(tracks) for ranks in seen.tokens.values() for tracks in ranks} == {2}
    for step, ranks in seen.tokens.items():
        assert max(max(tracks) for tracks in ranks) <= seen.bounds[step]
    decodes = [
        (max(map(max, ranks)), max(map(sum, ranks))) for ranks in seen.tokens.values() if max(map(sum, ranks)) < 4
    ]
    assert decodes
    assert all(fullest == -(-most // 2) for fullest, most in decodes)
    assert {rank.cut_steps for rank in stats} == {len(seen.tokens)}
    assert {rank.uncut_steps for rank in stats} == {""}


def test_tracks_with_drafts_and_prompts_keep_to_what_all_expect(small_v3: Path, alone):
    asks = mixed_asks(3, 6)
    for ask in asks:
        alone(ask)
    check(small_v3, asks, replace(BASE, ranks=2, tracks=3, draft_share=0.5, max_num_batched_tokens=64), alone)


@pytest.mark.parametrize("auto", [False, True])
def test_refused_cuts_are_told_by_reason(small_v3: Path, auto: bool):
    config = engine_config(small_v3, replace(BASE, ranks=2))
    config = replace(config, overlap=DboConfig(dbo="auto" if auto else "on"))
    with Engine(config) as engine:
        engine.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=4))
        [first, second] = engine.stats().ranks
    assert first.cut_steps == second.cut_steps == 0
    assert first.uncut_steps == second.uncut_steps
    assert "below the decode threshold" in first.uncut_steps
    assert "1 below the prefill threshold" in first.uncut_steps


def row(num_tokens: int, *, start: int = 0, drafts: int = 0, samples: bool = True) -> Row:
    request = Request(id="r", prompt=(5,) * (start + num_tokens), params=SamplingParams(), arrival=0)
    request.slot = 0
    return Row(request=request, start=start, num_tokens=num_tokens, num_drafts=drafts, samples=samples)


def test_rows_that_decode_and_prompts_are_measured_apart():
    rows = (row(1, start=50), row(3, start=9, drafts=2), row(40), row(12, start=4, samples=False))
    assert longest_rows(Proposal(Rows.of(rows), 4, 52)) == (3, 40)
    assert longest_rows(Proposal(Rows.of(()), 0, 0)) == (0, 0)


def test_rows_of_tracks_are_the_rows_of_the_step_in_another_order():
    rows = [row(1, start=length) for length in (90, 10, 80, 11, 70)]
    tracks = cut_rows(Rows.of(rows), 2)
    assert sorted(one.start for track in tracks for one in track) == [10, 11, 70, 80, 90]
    assert all(one in rows for track in tracks for one in track)
    assert sorted(len(track) for track in tracks) == [2, 3]
    [whole] = cut_rows(Rows.of(rows), 1)
    assert list(whole) == rows


VOTES = [
    Vote(0, 0, 0, decode_tokens=40, context_tokens=4000, unfinished=40, decode_row=1, compute_us=900, exchange_us=300),
    Vote(0, 0, 0, decode_tokens=3, prefill_tokens=500, unfinished=4, decode_row=1, prefill_row=400, compute_us=500,
         exchange_us=700),
    Vote(0, 0, 0, compute_us=100, exchange_us=1100),
]  # fmt: skip


def test_a_step_is_what_the_fullest_rank_makes_it():
    need = need_of(VOTES, bucket=503, prefill_allowed=None)
    assert need == Need(tokens=503, decode_tokens=40, context_tokens=4000, longest_row=400, has_prompts=True)
    cut = need_of(VOTES, bucket=103, prefill_allowed=100)
    assert (cut.longest_row, cut.has_prompts) == (100, True)
    held = need_of(VOTES, bucket=40, prefill_allowed=0)
    assert (held.longest_row, held.has_prompts) == (1, False)
    assert taken_of(VOTES) == Taken(compute_us=900, exchange_us=300)


def test_the_plan_says_how_many_tracks_and_an_idle_rank_has_no_veto():
    state = HeartbeatState(overlap=OverlapState(config=DboConfig(dbo="on")))
    votes = [VOTES[0], VOTES[2]]
    plan, after = decide(votes, state)
    assert (plan.tracks, plan.track_tokens, plan.overlap) == (2, 20, Choice.CUT)
    assert uncut_words(after.overlap) == ""
    plan, after = decide([vote._replace(decode_tokens=5) for vote in votes], after)
    assert (plan.tracks, plan.track_tokens, plan.overlap) == (1, 5, Choice.FEW_DECODE_TOKENS)
    assert uncut_words(after.overlap) == "1 below the decode threshold"


def test_where_overlap_is_off_the_state_stays_as_it_is():
    plan, after = decide(VOTES, HeartbeatState())
    assert (plan.tracks, plan.track_tokens, plan.overlap) == (1, 503, Choice.OFF)
    assert after.overlap == OverlapState()


def test_what_a_track_may_have_follows_from_votes_alone():
    state = HeartbeatState(overlap=OverlapState(config=DboConfig(dbo="on", dbo_tracks=3)))
    plan, _ = decide([vote._replace(decode_tokens=600, decode_row=5) for vote in VOTES], state)
    assert plan.track_tokens == most_tokens(1100, num_tracks=3, longest_row=400)


def test_kernels_leave_multiprocessors_to_exchanges_in_steps_that_are_cut_and_in_no_others(
    small_v3: Path, monkeypatch: pytest.MonkeyPatch
):
    used: dict[tuple[str, int], int] = {}

    def counting(room: str, make: Callable[..., Any], method: str) -> Callable[..., Any]:
        def build(name: str, *, comm_sms: int = 0) -> Any:
            ops = make(name, comm_sms=comm_sms)
            plain = getattr(ops, method)

            def counted(*args: Any, **how: Any) -> Any:
                used[room, comm_sms] = used.get((room, comm_sms), 0) + 1
                return plain(*args, **how)

            setattr(ops, method, counted)
            return ops

        return build

    monkeypatch.setattr(runtime.forward.decoder, "attention_ops", counting("attention", attention_ops, "attend"))
    monkeypatch.setattr(runtime.forward.decoder, "moe_ops", counting("moe", moe_ops, "experts"))
    asks = mixed_asks(8, 3)

    def rooms(tracks: int) -> dict[tuple[str, int], int]:
        used.clear()
        run_mix(small_v3, asks, replace(BASE, tracks=tracks))
        return dict(used)

    whole, cut = rooms(1), rooms(2)
    assert set(whole) == {("attention", 0), ("moe", 0)}
    assert set(cut) == {("attention", 20), ("moe", 20)}


@pytest.mark.parametrize("make", [attention_ops, moe_ops])
def test_grids_that_stay_are_smaller_by_what_is_left_to_exchanges(make: Callable[..., Any], monkeypatch: Any):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    assert make("triton", comm_sms=20)._num_programs(torch.device("cuda")) == 112
    assert make("triton")._num_programs(torch.device("cuda")) == 132


def test_a_run_that_cuts_no_step_leaves_nothing():
    assert [EngineConfig(model="", overlap=DboConfig(dbo=dbo)).left_sms for dbo in ("auto", "off")] == [20, 0]


def test_exchanges_cannot_take_the_whole_device():
    h200 = Hardware(
        name="H200", memory_bytes=1, bf16_flops=1, fp8_flops=1, memory_bytes_per_s=1, link_bytes_per_s=0,
        network_bytes_per_s=0, multiprocessors=132,
    )  # fmt: skip
    assert comm_share(DboConfig(comm_sms=33), h200) == 0.25
    assert comm_share(DboConfig(), replace(h200, multiprocessors=0)) == 0.0
    with pytest.raises(ValueError, match="comm_sms is 132; H200 has 132 multiprocessors, and kernels need some"):
        comm_share(DboConfig(comm_sms=132), h200)
