import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.requests.sampling_params import SamplingParams
from runtime.sampling.sampler import Sampled, SamplerBatch, SampleRow, pick, rank_ids, sample
from runtime.sampling.sampler_reference import (
    drawn_token,
    edited_logits,
    log_probabilities,
    probabilities,
    random_number,
    ranked_ids,
    shares_before,
)

NO_TABLE = torch.zeros(1, 0, dtype=torch.int32)
INF = math.inf


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def row(params: SamplingParams | None = None, **fields: Any) -> SampleRow:
    return SampleRow(
        **{"params": params or SamplingParams(), "seed": 1, "slot": 0, "position": 0, "prompt_len": 0} | fields
    )


def run(logits: Sequence[Sequence[float]] | Tensor, rows: Sequence[SampleRow], table: Tensor = NO_TABLE) -> Sampled:
    logits_BV = logits if isinstance(logits, Tensor) else torch.tensor(logits, dtype=torch.float64)
    before_BV = logits_BV.clone()
    batch = SamplerBatch.build(dict(enumerate(rows)), num_rows=len(rows), vocab_size=logits_BV.shape[1])
    sampled = sample(logits_BV, batch, table)
    assert torch.equal(logits_BV.nan_to_num(7.0), before_BV.nan_to_num(7.0)), "the logits were changed"
    return sampled


def tokens(logits: Sequence[float], params: SamplingParams, *, num: int = 200, **fields: Any) -> list[int]:
    """What `num` different choice indices draw from the same logits."""
    rows = [row(params, choice_index=index, **fields) for index in range(num)]
    return run([logits] * num, rows).token_B.tolist()


def test_how_rows_are_put_together_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = torch.randn(20, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    asked = (
        SamplingParams(seed=3),
        SamplingParams(top_p=0.7, logprobs=3),
        SamplingParams(top_k=4, min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=1),
        SamplingParams(temperature=0.0),
    )
    table = torch.randint(0, 33, (20, 9), generator=torch.Generator().manual_seed(1))
    rows = [row(asked[n % 5], seed=n, slot=n, position=n % 9, prompt_len=n % 4 if n % 9 > 3 else 0) for n in range(20)]
    together = run(logits_BV, rows, table)
    monkeypatch.setattr("runtime.sampling.sampler_batch.GROUP_LOGITS", 70)  # two rows of 33
    apart = run(logits_BV, rows, table)
    assert torch.equal(together.token_B, apart.token_B)
    assert torch.equal(together.logprob_B.nan_to_num(7.0), apart.logprob_B.nan_to_num(7.0))
    for n, each in enumerate(rows):
        own = slice(each.params.logprobs or 0)
        assert torch.equal(together.top_ids_BK[n, own], apart.top_ids_BK[n, own])
        assert torch.equal(together.top_logprobs_BK[n, own], apart.top_logprobs_BK[n, own])


GRID = st.integers(-32, 32).map(lambda quarter: quarter / 4)
"""Coarse, so that ties are common."""


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], list[int]]:
    """Logits, parameters, prompt and output over one small vocabulary."""
    vocab_size = draw(st.integers(1, 40))
    ids = st.integers(0, vocab_size - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=8))
    output = draw(st.lists(ids, max_size=8))
    neutral_or = {
        "temperature": st.sampled_from([0.0, 1.0, 0.3, 2.5, 1e-9, 1e9]),
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.123, 1e-12]),
        "min_p": st.sampled_from([0.0, 0.0101, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.75, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.25]),
        "logit_bias": st.none() | st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3),
        "stop_token_ids": st.lists(ids, max_size=2).map(tuple),
        "min_tokens": st.integers(0, 9),
    }
    params = SamplingParams(**{name: draw(values) for name, values in neutral_or.items()})
    logits = draw(st.lists(GRID | st.just(-INF), min_size=vocab_size, max_size=vocab_size))
    return logits, params, prompt, output


@given(question=questions(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_every_rule_in_any_mix_equals_the_scalar_loop(
    question: tuple[list[float], SamplingParams, list[int], list[int]], seed: int
) -> None:
    logits, params, prompt, output = question
    edited = edited_logits(logits, params, prompt=prompt, output=output, stop_ids={0})
    table = torch.full((3, 20), 10**9, dtype=torch.int32)
    table[1, : len(prompt) + len(output)] = torch.tensor(prompt + output)
    position = len(prompt) + len(output)
    rows = [
        row(
            params,
            seed=seed,
            slot=1,
            position=position,
            prompt_len=len(prompt),
            choice_index=c,
            stop_ids=frozenset({0}),
        )
        for c in range(20)
    ]
    found = run([logits] * len(rows), rows, table)
    if max(edited) == -INF or max(logits) == -INF:
        assert not found.ok_B.any()
        return
    assert found.ok_B.all()
    probability = probabilities(edited, params)
    assume_off_the_border(edited, params)
    for choice, token in enumerate(found.token_B.tolist()):
        random = random_number(seed, position=position, choice_index=choice, draw=0)
        nearby = {drawn_token(probability, random + shift) for shift in (-1e-9, 0.0, 1e-9)}
        assert token in nearby, (choice, random, probability)


def assume_off_the_border(edited: list[float], params: SamplingParams) -> None:
    """Where a share comes to top_p, or a weight to min_p, within rounding, floats and fixed point may differ."""
    if params.is_greedy:
        return
    weights = [math.exp((logit - max(edited)) / params.temperature) for logit in edited]
    assume(all(weight == 1.0 or abs(weight - params.min_p) > 1e-9 for weight in weights))
    kept = probabilities(edited, dataclasses.replace(params, top_p=1.0))
    if params.top_p < 1.0:
        before = shares_before(ranked_ids(edited), kept)
        assume(all(abs(share - params.top_p) > 1e-9 for share in before[1:]))


@given(
    values=st.lists(st.lists(GRID | st.just(-INF), min_size=130, max_size=130), min_size=1, max_size=3),
    num_ranked=st.integers(1, 130),
)
@settings(max_examples=30, deadline=None)
def test_ranks_go_by_value_and_then_by_the_lowest_id(values: list[list[float]], num_ranked: int) -> None:
    for dtype in (torch.float32, torch.float64):
        found = rank_ids(torch.tensor(values, dtype=dtype), num_ranked)
        assert found.tolist() == [ranked_ids(line)[:num_ranked] for line in values]


def test_few_ranks_of_a_row_that_is_all_ties_are_the_lowest_ids() -> None:
    x_nV = torch.zeros(2, 1000)
    x_nV[1, 990] = 1.0
    assert rank_ids(x_nV, 4).tolist() == [[0, 1, 2, 3], [990, 0, 1, 2]]


def test_a_pick_passes_over_tokens_of_no_weight() -> None:
    q_nV = torch.tensor([[3, 0, 1]]).expand(5, -1).contiguous()
    random = torch.tensor([2.0**-53, 0.74, 0.75, 0.99, 1 - 2.0**-53], dtype=torch.float64)
    assert pick(q_nV, random).tolist() == [0, 0, 2, 2, 2]
    large_nV = torch.tensor([[0, 2**61, 2**61 - 1, 0]])
    assert pick(large_nV, random[-1:]).tolist() == [2]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    for vocab_size in (1, 7, 64, 1001):
        logits_BV = torch.zeros(3, vocab_size)
        logits_BV[1, vocab_size // 2 :] = 2.0
        logits_BV[2, ::5] = 1.0
        found = run(logits_BV, [row(SamplingParams(temperature=0))] * 3)
        assert found.token_B.tolist() == [0, vocab_size // 2, 0]


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, min_p=0.02),
    SamplingParams(temperature=1.7, top_k=12),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.3, top_k=25, top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("params", FILTERS, ids=["plain", "min_p", "top_k", "top_p", "all"])
@pytest.mark.parametrize("varied", ["position", "choice_index", "seed"])
def test_drawn_tokens_follow_the_distribution(params: SamplingParams, varied: str) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    num = 2000
    rows = [row(params, **{varied: index}) for index in range(num)]
    counts = Counter(run(logits.expand(num, -1), rows).token_B.tolist())
    expected = {token: p * num for token, p in enumerate(probabilities(logits.tolist(), params)) if p > 0}
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    assert statistic < chi_square_999(len(expected) - 1)


def chi_square_999(freedom: int) -> float:
    """What chi-square passes once in a thousand (Wilson and Hilferty's cube)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


MIX = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=3),
    SamplingParams(temperature=0, logit_bias={3: 50.0}, min_tokens=2, stop_token_ids=(3,)),
    SamplingParams(logprobs=5),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.4, top_p=0.3),
    SamplingParams(temperature=0.7, top_p=0.2, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.5, top_k=3, logprobs=1),
    SamplingParams(temperature=1.5, top_k=400, top_p=0.99),
    SamplingParams(temperature=2.0, min_p=0.1, min_tokens=5, stop_token_ids=(1, 2), logprobs=20),
]


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "copies", "threads"),
    [(torch.float32, 523, 3, 1), (torch.float64, 523, 3, 1), (torch.float32, 40_009, 1, 2)],
)
def test_a_row_alone_equals_the_row_among_others_bit_for_bit(
    dtype: torch.dtype, vocab_size: int, copies: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(vocab_size)
    params = MIX * copies
    logits_BV = 3 * torch.randn(len(params), vocab_size, generator=generator, dtype=dtype)
    logits_BV[7] = math.nan
    table = torch.randint(0, vocab_size, (len(params), 40), generator=generator, dtype=torch.int32)
    rows = [row(p, slot=i, position=12 + i % 9, prompt_len=10, seed=i // len(MIX)) for i, p in enumerate(params)]
    together = run(logits_BV, rows, table)
    order = torch.randperm(len(rows), generator=generator)
    shuffled = run(logits_BV[order], [rows[index] for index in order.tolist()], table)
    for place, index in enumerate(order.tolist()):
        alone = run(logits_BV[index : index + 1], [rows[index]], table)
        num_top = rows[index].params.logprobs or 0
        assert line(alone, 0, num_top) == line(together, index, num_top) == line(shuffled, place, num_top)


def line(sampled: Sampled, index: int, num_top: int) -> str:
    """Everything said of one row; a text, so that NaN equals NaN. repr of a float is exact."""
    tops = sampled.top_ids_BK[index, :num_top].tolist(), sampled.top_logprobs_BK[index, :num_top].tolist()
    return repr((sampled.token_B[index].item(), sampled.ok_B[index].item(), sampled.logprob_B[index].item(), tops))


def test_a_row_keeps_its_token_when_it_is_sampled_again_in_another_slot() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    table = torch.arange(40, dtype=torch.int64).expand(5, -1)
    params = SamplingParams(repetition_penalty=1.2)
    first = run(logits, [row(params, slot=0, position=30, prompt_len=4)], table)
    again = run(logits, [row(params, slot=4, position=30, prompt_len=4)], table)
    assert first.token_B.tolist() == again.token_B.tolist()


def test_seed_position_and_choice_each_change_the_draw() -> None:
    flat = torch.zeros(1, 10_000)
    base = {"seed": 5, "position": 9, "choice_index": 2}
    drawn = [
        run(flat, [row(None, **base | change)]).token_B.item()
        for change in ({}, {"seed": 6}, {"position": 10}, {"choice_index": 3}, {"seed": 5 + 2**40})
    ]
    assert len(set(drawn)) == len(drawn)
    assert run(flat, [row(None, **base)]).token_B.item() == drawn[0]


BAD_ROWS = {
    "all -inf": [-INF] * 5,
    "all NaN": [math.nan] * 5,
    "one NaN": [0.0, math.nan, 2.0, 1.0, -1.0],
    "one +inf": [0.0, INF, 2.0, 1.0, -1.0],
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("params", MIX)
def test_a_row_without_usable_logits_is_flagged_and_the_others_do_not_notice(name: str, params: SamplingParams) -> None:
    good = [0.5, 1.0, 2.0, 0.25, -1.0]
    rows = [row(params, position=4, prompt_len=3, slot=0)] * 3
    table = torch.tensor([[1, 2, 1, 2]])
    found = run([good, BAD_ROWS[name], good], rows, table)
    alone = run([good], rows[:1], table)
    assert found.ok_B.tolist() == [True, False, True]
    assert found.token_B[1] == 0
    assert found.logprob_B[1].isnan()
    assert found.top_logprobs_BK[1].isnan().all()
    assert (found.top_ids_BK[1] == -1).all()
    assert line(found, 0, 20) == line(found, 2, 20) == line(alone, 0, 20)


def test_a_nan_under_a_masked_token_is_still_seen() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(1,))
    assert run([[0.0, math.nan, 1.0]], [row(params)]).ok_B.tolist() == [False]


def test_a_row_whose_every_token_is_masked_is_flagged() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=(0, 1))
    assert run([[0.0, 1.0], [0.0, 1.0]], [row(params), row()]).ok_B.tolist() == [False, True]


def test_no_rows_are_an_ordinary_batch() -> None:
    found = run(torch.zeros(0, 50), [])
    assert [getattr(found, field.name).shape[0] for field in dataclasses.fields(found)] == [0] * 5


def test_a_vocabulary_of_one_token_leaves_no_choice() -> None:
    for params in (*MIX[4:6], SamplingParams(top_k=1), SamplingParams(temperature=0)):
        assert tokens([-3.0], params, num=3, position=1) == [0, 0, 0]


LOGITS = [1.0, 3.0, 2.0, 3.0, 0.0]


def test_top_k_past_the_vocabulary_keeps_everything() -> None:
    assert tokens(LOGITS, SamplingParams(top_k=10**6)) == tokens(LOGITS, SamplingParams())


def test_top_k_breaks_a_tie_by_the_lowest_id() -> None:
    assert set(tokens(LOGITS, SamplingParams(top_k=1))) == {1}
    assert set(tokens([2.0, 1.0, 1.0, 1.0], SamplingParams(top_k=2))) == {0, 1}


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    assert set(tokens(LOGITS, SamplingParams(top_p=5e-324))) == {1}


def test_top_p_stops_exactly_where_the_share_is_reached() -> None:
    assert set(tokens([0.0] * 4, SamplingParams(top_p=0.5))) == {0, 1}
    assert set(tokens([0.0] * 4, SamplingParams(top_p=0.51))) == {0, 1, 2}
    assert set(tokens([0.0] * 4, SamplingParams(top_p=0.5, top_k=2))) == {0}


def test_top_p_over_a_large_flat_and_a_large_peaked_vocabulary() -> None:
    flat = tokens([0.0] * 3000, SamplingParams(top_p=0.25), num=300)
    assert max(flat) < 750
    assert max(flat) > 650
    peaked = [0.0] * 3000
    peaked[2000:2004] = [20.0, 20.0, 20.0, 20.0]
    assert set(tokens(peaked, SamplingParams(top_p=0.9))) == {2000, 2001, 2002, 2003}


def test_min_p_of_1_keeps_only_the_equals_of_the_most_likely() -> None:
    assert set(tokens(LOGITS, SamplingParams(min_p=1.0))) == {1, 3}


def test_a_tiny_temperature_takes_the_best_and_a_huge_one_takes_any() -> None:
    best_two = [1.0, 1.0 + 1e-12, 1.0 + 1e-12, -INF]
    assert set(tokens(best_two, SamplingParams(temperature=5e-324))) == {1, 2}
    assert set(tokens(best_two, SamplingParams(temperature=1e-300))) == {1, 2}
    assert set(tokens([-1e4, 1e4, 0.0, -INF], SamplingParams(temperature=1e308))) == {0, 1, 2}


def greedy_with(logits: Sequence[float], history: Sequence[int], prompt_len: int, **fields: Any) -> int:
    rows = [row(SamplingParams(temperature=0, **fields), position=len(history), prompt_len=prompt_len)]
    return run([logits], rows, torch.tensor([[*history, 0, 0]])).token_B.item()  # pyright: ignore[reportReturnType]


def test_frequency_counts_every_repetition_and_presence_only_the_first() -> None:
    history = [4, 4, 4, 1, 1, 1, 2]
    logits = [0.0, 3.0, 2.0, 1.75, 9.0]
    assert greedy_with(logits, history, 3) == 4
    assert greedy_with(logits[:4], [3, *history[3:]], 1, frequency_penalty=0.4) == 1
    assert greedy_with(logits[:4], [3, *history[3:]], 1, frequency_penalty=0.5) == 3
    assert greedy_with(logits[:4], [3, *history[3:]], 1, presence_penalty=1.2) == 1
    assert greedy_with(logits[:4], [3, *history[3:]], 1, presence_penalty=1.3) == 3


def test_presence_and_frequency_look_at_the_output_and_repetition_at_the_prompt_too() -> None:
    assert greedy_with([2.0, 1.5], [0, 0], 2, frequency_penalty=2, presence_penalty=2) == 0
    assert greedy_with([2.0, 1.5], [0, 0], 2, repetition_penalty=2) == 1
    assert greedy_with([-2.0, -2.5], [0, 0], 2, repetition_penalty=2) == 1


def test_what_the_table_holds_past_the_position_is_not_history() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2)
    rows = [row(params, slot=0, position=1, prompt_len=0), row(params, slot=1, position=3, prompt_len=0)]
    found = run([[2.0, 1.5, 1.0]] * 2, rows, torch.tensor([[2, 0, 10**9], [0, 0, 1]], dtype=torch.int32))
    assert found.token_B.tolist() == [0, 2]


def test_ending_tokens_are_masked_until_min_tokens_are_there() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    logits = [1.0, 3.0, 2.0]
    rows = [row(params, position=5 + num, prompt_len=5, stop_ids=frozenset({2})) for num in range(3)]
    assert run([logits] * 3, rows).token_B.tolist() == [0, 0, 1]


def test_a_bias_moves_only_its_own_tokens_of_its_own_row() -> None:
    rows = [row(SamplingParams(temperature=0, logit_bias={2: 5.0})), row(SamplingParams(temperature=0))]
    assert run([[1.0, 2.0, 0.0]] * 2, rows).token_B.tolist() == [2, 1]


def test_reported_log_probabilities_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={0: 100.0}, logprobs=3)
    found = run([LOGITS], [row(params)])
    expected = log_probabilities(LOGITS)
    assert found.token_B.item() == 0
    assert found.logprob_B.item() == pytest.approx(expected[0], abs=1e-15)
    assert found.top_ids_BK.tolist() == [[1, 3, 2]]
    assert found.top_logprobs_BK[0].tolist() == pytest.approx([expected[1], expected[3], expected[2]], abs=1e-15)


def test_rows_that_ask_for_fewer_log_probabilities_get_what_they_ask() -> None:
    wanted = (None, 0, 2, 20)
    found = run([LOGITS] * 4, [row(SamplingParams(temperature=0, logprobs=num)) for num in wanted])
    assert found.logprob_B.isnan().tolist() == [True, False, False, False]
    assert found.top_ids_BK.shape == (4, 20)
    assert found.top_ids_BK[2, :2].tolist() == [1, 3]
    assert found.top_ids_BK[3].tolist() == [1, 3, 2, 0, 4] + [-1] * 15
    assert found.top_logprobs_BK[3, 5:].isnan().all()


def test_float64_logits_are_told_apart_where_float32_could_not() -> None:
    logits = [[1.0, 1.0 + 1e-13, 1.0]]
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=0, top_p=0.1)):
        found = run(logits, [row(dataclasses.replace(params, logprobs=1))])
        assert found.token_B.tolist() == [1]
        assert found.top_ids_BK.tolist() == [[1]]
        assert found.logprob_B.dtype == torch.float64


def test_logits_narrower_than_float32_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="bfloat16"):
        run(torch.zeros(1, 4, dtype=torch.bfloat16), [row()])
