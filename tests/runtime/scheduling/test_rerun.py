"""Steps in which rows were left behind are run again, and nobody outside can tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ep import Terms
from runtime import Engine, FinishReason, RequestOutput, SamplingParams
from runtime.loop.worker import Worker
from tests.runtime.mixes import SMALL_V3, Ask, Settings, engine_config
from tests.runtime.test_invariance import assert_same, drafter_for, mixed_asks
from tests.runtime.tight import Watched, be_cramped, be_tight

RANKS = 4
FEW_PAGES = Settings(
    ranks=RANKS, block_size=4, num_blocks=18, max_num_seqs=4, enable_prefix_caching=True, max_num_batched_tokens=32
)


def few(step: int, terms: Terms) -> int:
    """Room for a number of tokens that is drawn anew for each step."""
    return random.Random(f"{step} {terms.bucket}").randrange(1, 3)


Cramp = Callable[[pytest.MonkeyPatch], list[Watched]]
CRAMPS: dict[str, Cramp] = {
    "bounded, 1": lambda patch: be_cramped(patch, 1),
    "bounded, 2": lambda patch: be_cramped(patch, 2),
    "two nodes, 1": lambda patch: be_cramped(patch, 1, node_size=2),
    "random": lambda patch: be_tight(patch, few),
}


def asks_for(seed: int, count: int = 8) -> list[Ask]:
    """Greedy and sampled, with penalties and common beginnings, and with more to say than their pages can hold."""
    asks = mixed_asks(seed, count)
    lengths = [4 + 8 * (index % 4) for index in range(count)]
    return [
        Ask(prompt=ask.prompt[:30], params=replace(ask.params, max_tokens=length))
        for ask, length in zip(asks, lengths, strict=True)
    ]


def stream(engine: Engine, asks: Sequence[Ask], *, stop_after: dict[str, int]) -> dict[str, list[int]]:
    """The tokens of each request as they come out; `stop_after`: abort that request when so many have come."""
    for index, ask in enumerate(asks):
        engine.submit(ask.prompt, ask.params, request_id=str(index))
    told: dict[str, list[int]] = {str(index): [] for index in range(len(asks))}
    ended = set()
    for event in engine.events():
        assert event.request_id not in ended, f"request {event.request_id} had ended"
        told[event.request_id] += event.token_ids
        if event.finish_reason is not None:
            ended.add(event.request_id)
        if len(told[event.request_id]) >= stop_after.get(event.request_id, 1 << 30):
            engine.abort(event.request_id)
    return told


def check_counters(engine: Engine, tight: Sequence[Watched]) -> int:
    """Every page is free, what was counted is what happened; the number of steps that were run again."""
    workers = engine._ranks.workers
    for worker, stats, exchange in zip(workers, engine.stats().ranks, tight, strict=True):
        assert (stats.free_pages, len(worker.in_flight)) == (stats.num_pages, 0)
        assert stats.overflow_steps == len(exchange.steps)
        worker.experts.load.check_conserved(SMALL_V3["num_experts_per_tok"])
        assert worker.experts.load.num_tokens == worker.counters.computed_tokens
    [again] = {stats.rerun_steps for stats in engine.stats().ranks}
    unclean = {step for exchange in tight for step in exchange.steps}
    depth = engine.config.async_depth
    assert len(unclean) <= again <= (1 + depth) * len(unclean)
    return again


def run_tight(
    model: Path, asks: Sequence[Ask], chosen: Settings, tight: Sequence[Watched], **engine: object
) -> tuple[list[RequestOutput], int]:
    with Engine(engine_config(model, chosen), **engine) as running:
        for index, ask in enumerate(asks):
            running.submit(ask.prompt, ask.params, request_id=str(index))
        outputs = running.run()
        return outputs, check_counters(running, tight)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cramp", CRAMPS)
def test_rows_left_behind_change_no_token_and_no_logprob(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], monkeypatch: pytest.MonkeyPatch, cramp: str, depth: int
):
    asks = asks_for(20)
    truth = [alone(ask) for ask in asks]
    tight = CRAMPS[cramp](monkeypatch)
    outputs, again = run_tight(small_v3, asks, replace(FEW_PAGES, async_depth=depth), tight)
    for output, answer in zip(outputs, truth, strict=True):
        assert_same(output, answer)
    assert again > 2
    assert sum(output.num_preemptions for output in outputs) > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_are_judged_by_the_step_that_was_clean(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], monkeypatch: pytest.MonkeyPatch, depth: int
):
    asks = asks_for(21, 4)
    truth = [alone(ask) for ask in asks]
    tight = be_tight(monkeypatch, few)
    chosen = replace(FEW_PAGES, async_depth=depth)
    outputs, again = run_tight(small_v3, asks, chosen, tight, drafter=drafter_for(asks, alone, 0.6))
    for output, answer in zip(outputs, truth, strict=True):
        assert_same(output, answer)
    assert again > 3


def test_tokens_are_told_once_and_a_request_may_be_aborted_while_steps_are_run_again(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], monkeypatch: pytest.MonkeyPatch
):
    asks = asks_for(20)
    truth = [alone(ask).token_ids for ask in asks]
    stop_after = {str(index): 3 for index, tokens in enumerate(truth) if len(tokens) > 20}
    assert stop_after
    tight = be_cramped(monkeypatch, 2)
    with Engine(engine_config(small_v3, replace(FEW_PAGES, async_depth=1))) as engine:
        told = stream(engine, asks, stop_after=stop_after)
        check_counters(engine, tight)
    for index, tokens in enumerate(truth):
        heard = told[str(index)]
        assert heard == tokens[: len(heard)], f"request {index}"
        assert len(heard) == len(tokens) or str(index) in stop_after
        assert len(heard) >= min(3, len(tokens))


def test_a_pause_is_complete_only_when_the_unclean_step_was_run_again(
    small_v3: Path, alone: Callable[[Ask], RequestOutput], monkeypatch: pytest.MonkeyPatch
):
    asks = asks_for(20, 4)
    tight = be_cramped(monkeypatch, 1)
    told: list[int] = []
    with Engine(engine_config(small_v3, replace(FEW_PAGES, async_depth=1))) as engine:
        for index, ask in enumerate(asks):
            engine.submit(ask.prompt, ask.params, request_id=str(index))
        while engine.num_unfinished:
            for event in engine.events():
                told += event.token_ids if event.request_id == "3" else ()
                engine.pause()
            assert all(not worker.in_flight for worker in engine._ranks.workers)
            engine.resume()
        check_counters(engine, tight)
    assert told == alone(asks[3]).token_ids


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("share", "cramp"), [(None, None), (0.6, "bounded, 2")])
def test_steps_that_run_twice_at_random_change_nothing(
    small_v3: Path,
    alone: Callable[[Ask], RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    share: float | None,
    cramp: str | None,
):
    asks = asks_for(22, 4)
    truth = [alone(ask) for ask in asks]
    if cramp is not None:
        CRAMPS[cramp](monkeypatch)
    num_twice = 0

    def run_twice(step: int) -> bool:
        nonlocal num_twice
        twice = random.Random(step).random() < 0.6
        num_twice += twice
        return twice

    chosen = replace(FEW_PAGES, async_depth=depth)
    with Engine(engine_config(small_v3, chosen), drafter=drafter_for(asks, alone, share)) as engine:
        for worker in engine._ranks.workers:
            worker.run_twice = run_twice
        for index, ask in enumerate(asks):
            engine.submit(ask.prompt, ask.params, request_id=str(index))
        for output, answer in zip(engine.run(), truth, strict=True):
            assert_same(output, answer)
        for worker, stats in zip(engine._ranks.workers, engine.stats().ranks, strict=True):
            assert stats.free_pages == stats.num_pages
            assert worker.experts.load.num_tokens == worker.counters.computed_tokens
    assert num_twice > 5 * RANKS


def test_frequent_overflows_raise_the_capacities_on_all_ranks_in_the_same_step(
    small_v3: Path, monkeypatch: pytest.MonkeyPatch
):
    levels: dict[int, list[int]] = {}

    def room(step: int, terms: Terms) -> int:
        levels.setdefault(step, []).append(terms.level)
        return 1 + 4 * terms.level

    tight = be_tight(monkeypatch, room)
    with Engine(engine_config(small_v3, replace(FEW_PAGES, async_depth=1))) as engine:
        engine.generate([ask.prompt for ask in asks_for(23)], [ask.params for ask in asks_for(23)])
        again = check_counters(engine, tight)
        notices = [text for text in engine.notices if "capacities" in text]
    [last] = set(levels[max(levels)])
    assert last > 0
    assert all(len(set(found)) == 1 and len(found) % RANKS == 0 for found in levels.values())
    assert [text.split(":")[0] for text in notices] == [
        f"the exchange's capacities are raised to level {level + 1}" for level in range(last)
    ]
    assert all("--exchange exact" in text for text in notices)
    assert again <= 2 * (3 * last + 2), "with room for all, steps are clean"


def test_where_rows_always_fit_a_step_is_finished_as_soon_as_it_is_read(small_v3: Path, monkeypatch):
    """No vote lies between the two, as it does where rows may be left behind."""

    def votes_until_finished() -> set[int]:
        waits = set()
        finish = Worker._finish

        def watched(worker: Worker, step):
            waits.add(worker.sequence - step.launched.plan.step)
            finish(worker, step)

        with monkeypatch.context() as patch, Engine(engine_config(small_v3, Settings(ranks=2))) as engine:
            patch.setattr(Worker, "_finish", watched)
            [output] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
            assert output.finish_reason is FinishReason.LENGTH
        return waits

    assert votes_until_finished() == {1}
    be_tight(monkeypatch, lambda step, terms: 100)
    assert votes_until_finished() == {2}
