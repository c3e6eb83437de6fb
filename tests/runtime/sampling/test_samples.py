"""What a step asks the sampler for, and what it reads back."""

import pytest
import torch

from runtime.requests.request import Request
from runtime.requests.rows import FAILED_TOKEN, Row, Rows, SampledRow
from runtime.requests.sampling_params import SamplingParams
from runtime.sampling.sampler import Sampled
from runtime.sampling.samples import TokenLogprob, read_rows, sample_rows, tokens_of


def request(name: str, **changes: object) -> Request:
    fields = {"id": name, "prompt": (5, 6, 7), "params": SamplingParams(logprobs=1), "arrival": 0, "seed": 11}
    made = Request(**(fields | changes))
    made.slot = 3
    return made


def test_everything_that_a_choice_depends_on_is_handed_to_the_sampler():
    row = Row(request("a", choice_index=2, stop_ids=frozenset({9})), 2, 1, 0, True)
    [sample] = sample_rows(Rows.of([row])).values()
    assert (sample.seed, sample.choice_index, sample.slot, sample.position, sample.prompt_len) == (11, 2, 3, 3, 3)
    assert sample.stop_ids == {9}


def test_a_row_with_drafts_samples_one_position_more_than_it_has_drafts():
    drafted, cut, plain = (
        Row(request("a"), 4, 3, 2, True),
        Row(request("b"), 0, 2, 0, False),
        Row(request("c"), 2, 1, 0, True),
    )
    asked = sample_rows(Rows.of([drafted, cut, plain]))
    assert {place: sample.position for place, sample in asked.items()} == {0: 5, 1: 6, 2: 7, 3: 3}


def test_who_only_wants_the_largest_logit_asks_nothing_of_the_sampler():
    greedy = SamplingParams(temperature=0.0)
    for row in (Row(request("a", params=greedy), 2, 1, 0, True), Row(request("b", params=greedy), 2, 3, 2, True)):
        asked = sample_rows(Rows.of([row, Row(request("c"), 2, 1, 0, True)]))
        assert {place: sample.position for place, sample in asked.items()} == {1 + row.num_drafts: 3}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, min_tokens=1),
        SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, presence_penalty=0.1),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
    ],
)
def test_whatever_is_more_than_the_largest_logit_is_asked(params: SamplingParams):
    assert list(sample_rows(Rows.of([Row(request("a", params=params), 2, 1, 0, True)]))) == [0]


def test_each_row_reads_its_own_samples_and_a_failed_one_says_so():
    rows = Rows.of(
        [Row(request("a"), 4, 2, 1, True), Row(request("b"), 0, 2, 0, False), Row(request("c"), 2, 1, 0, True)]
    )
    sampled = Sampled(
        token_B=torch.tensor([8, 9, 0]),
        ok_B=torch.tensor([True, True, False]),
        logprob_B=torch.tensor([-1.0, -2.0, -3.0]),
        top_ids_BK=torch.tensor([[8, 1], [4, 1], [-1, -1]]),
        top_logprobs_BK=torch.tensor([[-1.0, -5.0], [-0.5, -5.0], [-9.0, -9.0]]),
    )
    read = read_rows(rows, sampled, tokens_of(sampled).tolist())
    first, none, failed = (read.row(rows, index) for index in range(3))
    assert first == SampledRow((8, 9), [TokenLogprob(8, -1.0, {8: -1.0}), TokenLogprob(9, -2.0, {4: -0.5})])
    assert none == SampledRow(())
    assert failed.token_ids == (FAILED_TOKEN,)


def test_a_step_that_samples_nothing_is_read_as_nothing():
    rows = Rows.of([Row(request("a"), 0, 2, 0, False)])
    assert read_rows(rows, None, []).row(rows, 0) == SampledRow(())
