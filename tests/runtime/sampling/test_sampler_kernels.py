"""Choosing tokens in Triton's interpreter: the same tokens as the sampler in torch, rule by rule and in any mix."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.requests.sampling_params import SamplingParams
from runtime.sampling.sampler import Sampled, SampleRow
from runtime.sampling.sampler_kernels import choose, penalise
from runtime.sampling.sampler_ops import sampler_ops
from runtime.sampling.sampler_table import Columns, PenaltyColumns

pytestmark = pytest.mark.interpret

NO_TABLE = torch.zeros(1, 1, dtype=torch.int64)
MIX = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.3),
    SamplingParams(temperature=0, logit_bias={3: 50.0}, min_tokens=9, stop_token_ids=(3,)),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.6, min_p=0.01),
    SamplingParams(temperature=0.9, min_p=0.2),
    SamplingParams(temperature=1.1, presence_penalty=0.7, repetition_penalty=0.6, top_p=0.5, logit_bias={1: -3.0}),
    SamplingParams(temperature=1e-9, top_k=1),
    SamplingParams(temperature=5.0, top_p=1e-12),
]


def row(params: SamplingParams, **fields: Any) -> SampleRow:
    return SampleRow(**{"params": params, "seed": 1, "slot": 0, "position": 0, "prompt_len": 0} | fields)


def both(logits_BV: Tensor, rows: Mapping[int, SampleRow], table: Tensor = NO_TABLE) -> tuple[Sampled, Sampled]:
    """By kernels and by torch; rows that are not in `rows` are plain."""
    before_BV = logits_BV.clone()
    found = sampler_ops("triton").choose(logits_BV, rows, table)
    assert torch.equal(logits_BV.nan_to_num(7.0), before_BV.nan_to_num(7.0)), "the logits were changed"
    return found, sampler_ops("reference").choose(logits_BV, rows, table)


def assert_equal(found: Sampled, wanted: Sampled) -> None:
    for name in ("ok_B", "token_B", "logprob_B", "top_ids_BK", "top_logprobs_BK"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), (name, mine, theirs)


def quarters(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits on a coarse grid, so that ties are common."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-20, 20, shape, generator=generator) / 4).to(dtype)


def test_the_docstrings_choices_come_out():
    columns = Columns(
        ints_KB=torch.tensor([[1, 1], [7, 7], [0, 0], [0, 0]]),
        floats_KB=torch.tensor([[0.0, 3.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
    )
    token_B, ok_B = torch.full((2,), -5), torch.zeros(2, dtype=torch.bool)
    logits = torch.tensor([[0.5, 2.0, 2.0]] * 2)
    choose(logits, None, torch.tensor([0, 1]), columns, token_B=token_B, ok_B=ok_B)
    assert (token_B.tolist(), ok_B.tolist()) == ([1, 1], [True, True])


def test_the_docstrings_penalties_come_out():
    x_nV = torch.tensor([[3.0, -3.0, 1.0]], dtype=torch.float64)
    table = torch.tensor([[1, 0, 0, 2]])
    columns = PenaltyColumns(
        ints_KN=torch.tensor([[0], [3], [1]]),
        floats_KN=torch.tensor([[2.0], [0.5], [0.25]], dtype=torch.float64),
        history_len=3,
    )
    penalise(x_nV, table, columns, counts_nV=torch.full((1, 3), 99, dtype=torch.int32))
    assert x_nV.tolist() == [[0.25, -6.0, 1.0]]


@pytest.mark.parametrize("params", MIX, ids=range(len(MIX)))
def test_each_rule_chooses_what_torch_chooses(params: SamplingParams):
    history = torch.randint(0, 33, (2, 12), generator=torch.Generator().manual_seed(4))
    fields = {"slot": 1, "position": 10, "prompt_len": 4}
    rows = {index: row(params, choice_index=index, seed=2**63 + index, **fields) for index in range(2)}
    assert_equal(*both(quarters(2, 33, seed=1), rows, history))


def test_a_vocabulary_of_one_token():
    assert_equal(*both(torch.zeros(2, 1), {0: row(SamplingParams(top_p=0.5)), 1: row(SamplingParams(top_k=1))}))


def test_a_mix_of_rows_over_more_than_one_block_of_vocabulary():
    vocab_size = 2600
    history = torch.randint(0, vocab_size, (3, 40), generator=torch.Generator().manual_seed(5))
    few = MIX[2:10]
    rows = {2 * i: row(each, slot=i % 3, position=7 + i, prompt_len=5, seed=i) for i, each in enumerate(few)}
    logits_BV = torch.randn(2 * len(few), vocab_size, generator=torch.Generator().manual_seed(6)) * 3
    assert_equal(*both(logits_BV, rows, history))


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 0.5), (3, 1.0), (4, 0.999), (5, 0.5), (40, 0.9), (0, 0.05)])
def test_borders_among_ties_keep_the_lowest_ids(top_k: int, top_p: float):
    logits = torch.zeros(1, 20)
    logits[0, [3, 11]] = 1.0
    rows = {i: row(SamplingParams(top_k=top_k, top_p=top_p), choice_index=i) for i in range(2)}
    assert_equal(*both(logits.expand(2, -1).contiguous(), rows))


def test_float64_logits_count_as_edited():
    rows = {i: row(SamplingParams(top_k=4, top_p=0.7), choice_index=i) for i in range(3)}
    assert_equal(*both(quarters(4, 50, seed=2, dtype=torch.float64), rows))


def test_broken_rows_are_reported_and_others_do_not_notice():
    logits = quarters(6, 9, seed=3)
    logits[0, 4], logits[1, 0], logits[2], logits[3, 8] = math.nan, math.inf, -math.inf, -math.inf
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.8), SamplingParams(repetition_penalty=1.2)):
        found, wanted = both(logits, {index: row(params) for index in range(6)})
        assert_equal(found, wanted)
        assert found.ok_B.tolist() == [False, False, False, True, True, True]


def test_no_rows_are_an_ordinary_step():
    assert_equal(*both(torch.zeros(0, 5), {}))


def test_minus_zero_ties_with_zero():
    rows = {i: row(SamplingParams(top_k=1), choice_index=i) for i in range(2)}
    found, wanted = both(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]]), rows)
    assert_equal(found, wanted)
    assert found.token_B.tolist() == [1, 1]


def test_a_row_does_not_depend_on_its_batch_mates():
    logits = quarters(5, 40, seed=9)
    asked = row(SamplingParams(temperature=0.8, top_k=9, top_p=0.8), seed=77, position=3, prompt_len=1)
    table = torch.zeros(1, 5, dtype=torch.int64)
    others = {i: row(MIX[i + 5]) for i in range(4)}
    [alone] = sampler_ops("triton").choose(logits[4:], {0: asked}, table).token_B.tolist()
    assert sampler_ops("triton").choose(logits, others | {4: asked}, table).token_B[4] == alone
