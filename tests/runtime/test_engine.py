"""The engine as a program sees it: ids in, ids out, refusals in words, and a loud end when a rank fails."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import runtime.assembly
import runtime.graphs.runner
import runtime.loading
from dbo import drive
from ep import RequestError, SerriedError
from runtime import Engine, EngineConfig, FinishReason, SamplingParams
from runtime.graphs.runner import Ran
from runtime.loop.launcher import Launcher
from runtime.loop.worker import Worker
from tests.runtime.mixes import SMALL_V3, Ask, Settings, engine_config, run_mix

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def test_answers_come_in_the_order_of_the_prompts(small_v3: Path):
    prompts = [[5 + i, 6, 7] for i in range(5)]
    with Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
        together = engine.generate(prompts, GREEDY)
        apart = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in apart]
    assert [list(output.prompt_token_ids) for output in together] == prompts
    assert all(output.finish_reason is FinishReason.LENGTH for output in together)


def test_requests_go_where_the_least_waits_and_ties_go_round(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=3))) as engine:
        outputs = engine.generate([[5] * 50, [6], [7], [8]], GREEDY)
    assert [output.rank for output in outputs] == [0, 2, 1, 2]


def test_a_prompt_goes_where_its_beginning_is_cached_and_says_why(small_v3: Path):
    settings = Settings(ranks=3, block_size=16, num_blocks=64, enable_prefix_caching=True)
    common = [9] * 70
    with Engine(engine_config(small_v3, settings)) as engine:
        engine.submit([*common, 1], GREEDY, rank=2)
        engine.run()
        name = engine.submit([*common, 2], GREEDY)
        assert engine.explain(name)[2].endswith("<- chosen")
        [output] = engine.run()
    assert (output.rank, output.num_cached_tokens) == (2, 64)


def test_ranks_that_may_take_nothing_new_are_passed_over(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
        engine._desk.drain(0)
        outputs = engine.generate([[5], [6], [7]], GREEDY)
    assert [output.rank for output in outputs] == [1, 1, 1]


def test_a_request_may_join_while_others_decode(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
        [truth] = engine.generate([[9, 8, 7]], GREEDY)
        engine.submit([5, 6], replace(GREEDY, max_tokens=12), request_id="first")
        tokens: dict[str, list[int]] = {"first": [], "late": []}
        for event in engine.events():
            if not tokens["late"] and len(tokens["first"]) == 3 and event.request_id == "first":
                engine.submit([9, 8, 7], GREEDY, request_id="late")
            tokens[event.request_id].extend(event.token_ids)
    assert tokens["late"] == truth.token_ids
    assert len(tokens["first"]) == 12


def test_answers_of_other_requests_wait_for_run(small_v3: Path):
    with Engine(engine_config(small_v3, Settings())) as engine:
        engine.submit([5, 6], GREEDY, request_id="earlier")
        [output] = engine.generate([[7, 8]], GREEDY)
        [earlier] = engine.run()
        assert engine.run() == []
    assert (earlier.request_id, len(earlier.token_ids)) == ("earlier", 6)
    assert output.prompt_token_ids == (7, 8)


def test_requests_without_a_limit_count_as_long(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
        ranks = [engine._open[engine.submit([5] * n, replace(GREEDY, max_tokens=None))].rank for n in (60, 3, 3, 3)]
    assert sorted(ranks) == [0, 0, 1, 1]


def test_an_aborted_request_ends_once_and_the_others_go_on(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2, async_depth=1))) as engine:
        engine.submit([5, 6], replace(GREEDY, max_tokens=200), request_id="long")
        engine.submit([7, 8], GREEDY, request_id="short")
        reasons: dict[str, list[FinishReason]] = {"long": [], "short": []}
        for event in engine.events():
            if event.request_id == "short":
                engine.abort("long")
                engine.abort("long")
                engine.abort("unknown")
            if event.finish_reason is not None:
                reasons[event.request_id].append(event.finish_reason)
        assert all(rank.free_pages == rank.num_pages for rank in engine.stats().ranks)
    assert reasons == {"long": [FinishReason.ABORT], "short": [FinishReason.LENGTH]}


def test_leaving_the_events_early_aborts_the_rest_and_keeps_the_engine_usable(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
        [truth] = engine.generate([[5, 6]], GREEDY)
        engine.submit([5, 6], replace(GREEDY, max_tokens=200))
        for _ in engine.events():
            break
        assert engine.num_unfinished == 0
        assert all(rank.free_pages == rank.num_pages for rank in engine.stats().ranks)
        assert engine.generate([[5, 6]], GREEDY)[0].token_ids == truth.token_ids


def test_a_closed_engine_leaves_no_thread_behind(small_v3: Path):
    engine = Engine(engine_config(small_v3, Settings(ranks=3)))
    engine.submit([5, 6], replace(GREEDY, max_tokens=200))
    events = engine.events()
    next(events)
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_request_without_a_seed_reports_the_one_it_drew(small_v3: Path):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    with Engine(engine_config(small_v3, Settings())) as engine:
        first, second = engine.generate([[5, 6], [5, 6]], params)
        [again] = engine.generate([[5, 6]], replace(params, seed=second.seed))
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert again.token_ids == second.token_ids


def test_expert_counts_are_of_real_tokens_and_all_of_them(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=3, async_depth=1))) as engine:
        engine.generate([[5 + i, 6, 7] for i in range(4)], GREEDY)
        for worker in engine._ranks.workers:
            worker.experts.load.check_conserved(SMALL_V3["num_experts_per_tok"])
            assert worker.experts.load.num_tokens == worker.counters.computed_tokens


def test_an_id_may_be_used_again_for_another_prompt(small_v3: Path):
    with Engine(engine_config(small_v3, Settings())) as engine:
        [truth] = engine.generate([[9, 8, 7]], GREEDY)
        for prompt in ([5, 6, 7], [9, 8, 7]):
            engine.submit(prompt, GREEDY, request_id="same")
            [output] = engine.run()
    assert output.token_ids == truth.token_ids


def test_idle_ranks_step_as_often_as_busy_ones(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=4))) as engine:
        engine.submit([5, 6, 7], GREEDY, rank=2)
        engine.run()
        stats = engine.stats().ranks
    assert len({rank.steps for rank in stats}) == 1
    assert [rank.idle_steps for rank in stats] == [6, 6, 0, 6]


class OnlyFloat64(TorchDispatchMode):
    """Raises when an operation makes a floating tensor that is narrower than float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert tensor.dtype is torch.float64, f"{func} made {tensor.dtype}"
        return out


@pytest.mark.parametrize("combine", ["ranks", "slots"])
def test_a_float64_run_holds_nothing_narrower(small_v3: Path, monkeypatch: pytest.MonkeyPatch, combine: str):
    plain_sample = Launcher._sample

    def watched_drive(tracks, **how):
        with OnlyFloat64():
            return drive(tracks, **how)

    def watched_sample(launcher: Launcher, ran: Ran):
        with OnlyFloat64():
            return plain_sample(launcher, ran)

    monkeypatch.setattr(runtime.graphs.runner, "drive", watched_drive)
    monkeypatch.setattr(Launcher, "_sample", watched_sample)
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=1, max_tokens=5, logprobs=2)
    asks = [Ask(prompt=tuple(range(2, 2 + n)), params=params) for n in (1, 40)]
    run_mix(small_v3, asks, Settings(ranks=2, combine=combine, async_depth=1))


def test_a_rank_that_raises_ends_the_engine_with_its_name(small_v3: Path, monkeypatch: pytest.MonkeyPatch):
    plain = Worker._run

    def failing(worker: Worker, proposal, plan):
        if worker.transport.rank == 1 and plan.step == 2:
            raise RuntimeError("planted")
        return plain(worker, proposal, plan)

    with Engine(engine_config(small_v3, Settings(ranks=3))) as engine:
        monkeypatch.setattr(Worker, "_run", failing)
        with pytest.raises(RuntimeError, match="planted") as caught:
            engine.generate([[5, 6, 7]], GREEDY)
        assert any("rank 1" in note for note in caught.value.__notes__)
        with pytest.raises(SerriedError, match=r"engine has stopped: .*planted"):
            engine.submit([5], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, r"prompt .* at least one token"),
        ([5, 160], GREEDY, r"prompt\[1\].* 160.* must be a token id from 0 to 159"),
        ([5, -1], GREEDY, r"prompt\[1\].* -1.* must be a token id from 0 to 159"),
        ([5] * 256, GREEDY, r"must have at most 255 tokens: max_model_len is 256"),
        ([5] * 100, replace(GREEDY, max_tokens=40), r"needs 3 pages of 64 tokens, and the whole cache has 2 \(128"),
        ([5], replace(GREEDY, stop_token_ids=(160,)), r"stop_token_ids.*160"),
        ([5], replace(GREEDY, logit_bias={160: 1.0}), r"logit_bias.*160"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_the_door(small_v3: Path, prompt, params, message: str):
    with Engine(engine_config(small_v3, Settings(num_blocks=2))) as engine:
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, params)
        assert engine.num_unfinished == 0
        assert engine.generate([[5]], GREEDY)[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"cache_salt": "\ud800"}, r"cache_salt.*UTF-8"),
        ({"cache_salt": None}, r"cache_salt.*None.*must be text"),
        ({"priority": "a"}, r"priority.*'a'.*whole number"),
        ({"priority": float("nan")}, r"priority.*nan.*whole number"),
        ({"request_id": 5}, r"request_id.*5.*must be text"),
        ({"request_id": []}, r"request_id.*must be text"),
        ({"rank": 0.0}, r"rank.*0\.0.*must be from 0 to 0"),
        ({"rank": 1}, r"rank.*1.*must be from 0 to 0"),
        ({"params": {"temperature": 0}}, r"params.*must be SamplingParams"),
        ({"prompt_token_ids": 5}, r"prompt.*must be a sequence"),
        ({"prompt_token_ids": [10**400]}, r"prompt\[0\].*\.\.\..*must be a token id"),
        ({"prompt_token_ids": ["a"]}, r"prompt\[0\].*'a'.*must be a token id"),
        ({"prompt_token_ids": [True]}, r"prompt\[0\].*True.*must be a token id"),
    ],
)
def test_what_a_rank_would_stumble_over_is_refused_at_the_door(small_v3: Path, words: dict, message: str):
    with Engine(engine_config(small_v3, Settings(policy="priority", enable_prefix_caching=True))) as engine:
        with pytest.raises(RequestError, match=message):
            engine.submit(**({"prompt_token_ids": [5] * 70, "params": GREEDY} | words))
        assert engine.num_unfinished == 0


def test_prompts_of_numpy_and_torch_are_taken(small_v3: Path):
    with Engine(engine_config(small_v3, Settings())) as engine:
        outputs = engine.generate([[5, 6], np.array([5, 6]), torch.tensor([5, 6])], GREEDY)
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids


def test_decoding_within_decoding_is_refused_in_words(small_v3: Path):
    with Engine(engine_config(small_v3, Settings())) as engine:
        engine.submit([5, 6], GREEDY)
        for _ in engine.events():
            with pytest.raises(SerriedError, match="decodes already"):
                engine.run()
            break
        assert engine.generate([[5, 6]], GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_aborted_requests_count_as_finished(small_v3: Path):
    with Engine(engine_config(small_v3, Settings())) as engine:
        engine.submit([5, 6], GREEDY, request_id="gone")
        engine.submit([5, 6], GREEDY)
        engine.abort("gone")
        engine.run()
        assert engine.stats().ranks[0].finished == 2


@pytest.mark.parametrize("drafts", [None, [160], [-1], ["a"], [5, 10**30]])
def test_a_drafter_that_guesses_no_tokens_changes_nothing(small_v3: Path, drafts):
    with Engine(engine_config(small_v3, Settings()), drafter=lambda request: drafts) as engine:
        [output] = engine.generate([[5, 6]], GREEDY)
    with Engine(engine_config(small_v3, Settings())) as engine:
        [truth] = engine.generate([[5, 6]], GREEDY)
    assert output.token_ids == truth.token_ids


@pytest.mark.parametrize(
    "words",
    [{"ranks": "2"}, {"ranks": 1.5}, {"ranks": True}, {"ranks": 0}, {"seed": "x"}, {"seed": -1}, {"async_depth": 2}],
)
def test_a_setting_of_the_wrong_kind_is_named(words: dict):
    with pytest.raises(ValueError, match=next(iter(words))):
        EngineConfig(model="any", **words)


def test_a_batch_with_one_bad_prompt_queues_none(small_v3: Path):
    with Engine(engine_config(small_v3, Settings())) as engine:
        with pytest.raises(RequestError, match="160"):
            engine.generate([[5], [160]], GREEDY)
        assert engine.num_unfinished == 0


def test_at_depth_1_a_step_is_launched_before_the_one_before_it_is_read(small_v3: Path, monkeypatch):
    assert EngineConfig(model="any").async_depth == 1
    orders = {}
    for depth in (0, 1):
        seen = orders[depth] = []
        launch, finish = Launcher.launch, Worker._finish
        with monkeypatch.context() as patch:
            patch.setattr(Launcher, "launch", lambda *a, f=launch, s=seen: (s.append(f"launch {a[2].step}"), f(*a))[1])
            patch.setattr(
                Worker,
                "_finish",
                lambda *a, f=finish, s=seen: (s.append(f"read {a[1].launched.plan.step}"), f(*a))[1],
            )
            with Engine(engine_config(small_v3, Settings(async_depth=depth))) as engine:
                engine.generate([[5, 6]], replace(GREEDY, max_tokens=3))
    assert orders[0] == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]
    assert orders[1] == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]


def test_the_plan_is_announced_before_anything_is_read_or_allocated(small_v3: Path, monkeypatch: pytest.MonkeyPatch):
    order = []
    parts = {"load_shared": runtime.loading, "load_banks": runtime.loading}
    for name in ("load_shared", "load_banks", "LatentCache", "RequestTable"):
        module = parts.get(name, runtime.assembly)
        plain = getattr(module, name)
        noted = lambda *a, f=plain, n=name, **k: (order.append(n), f(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    Engine(engine_config(small_v3, Settings()), on_plan=lambda plan: order.append("plan")).close()
    assert order[0] == "plan"
    assert set(order) == {"plan", "load_shared", "load_banks", "LatentCache", "RequestTable"}


def test_a_paused_engine_has_nothing_in_flight_and_goes_on_where_it_was(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2, async_depth=1))) as engine:
        [truth] = engine.generate([[5, 6]], replace(GREEDY, max_tokens=20))
        engine.submit([5, 6], replace(GREEDY, max_tokens=20), request_id="again")
        tokens: list[int] = []
        for event in engine.events():
            tokens += event.token_ids
            if len(tokens) == 4:
                engine.pause()
                engine.pause()
        assert 4 <= len(tokens) < 20
        assert all(not worker.in_flight for worker in engine._ranks.workers)
        assert list(engine.events()) == []
        engine.resume()
        engine.resume()
        for event in engine.events():
            tokens += event.token_ids
    assert tokens == truth.token_ids


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing_new(small_v3: Path):
    with Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
        engine.submit([5, 6], GREEDY)
        engine.drain()
        engine.drain()
        with pytest.raises(SerriedError, match="drains"):
            engine.submit([5, 6], GREEDY)
        [output] = engine.run()
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ranks", [17, 65, 1000])
def test_more_ranks_than_experts_are_refused_with_the_number_that_would_do(small_v3: Path, ranks: int):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
        Engine(engine_config(small_v3, Settings(ranks=ranks)))
    assert str(caught.value) == (
        f"num_ranks {ranks} must be from 1 to 16: each rank holds at least one of the 16 routed experts, so 16 would do"
    )


def test_a_dense_model_decodes_on_one_rank_and_on_two(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_V3 | {"first_k_dense_replace": 3}))
    asks = [Ask(prompt=(5, 6, 7), params=replace(GREEDY, logprobs=0)), Ask(prompt=(8,), params=GREEDY)]
    one, two = (run_mix(tmp_path, asks, Settings(ranks=ranks)) for ranks in (1, 2))
    assert [output.token_ids for output in one] == [output.token_ids for output in two]


def test_rows_without_usable_logits_end_alone_with_an_error(small_v3: Path, monkeypatch: pytest.MonkeyPatch):
    from runtime.forward.decoder import Decoder

    plain = Decoder.logits

    def spoiled(decoder: Decoder, x_BD: torch.Tensor) -> torch.Tensor:
        logits = plain(decoder, x_BD)
        logits[:1] = torch.nan
        return logits

    with Engine(engine_config(small_v3, Settings())) as engine:
        monkeypatch.setattr(Decoder, "logits", spoiled)
        engine.submit([5, 6], GREEDY, request_id="spoiled")
        engine.submit([7, 8], GREEDY, request_id="next")
        first = next(iter(engine.events()))
    assert (first.request_id, first.finish_reason, first.token_ids) == ("spoiled", FinishReason.ERROR, ())


def test_where_files_lie_is_no_difference_between_ranks(small_v3: Path):
    config = engine_config(small_v3, Settings())
    elsewhere = replace(config, model="/another/place")
    assert config.digest("model") == elsewhere.digest("model")
    assert config.digest("model") != replace(config, async_depth=1 - config.async_depth).digest("model")
