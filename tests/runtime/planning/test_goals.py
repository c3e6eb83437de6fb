"""Little's law and what a goal may be."""

from __future__ import annotations

import pytest

from runtime.planning.goals import Goals, fullest_prompts, requests_in_flight, sustained_rate


def test_fifty_requests_a_second_of_500_tokens_at_40_ms_are_a_thousand_in_flight():
    assert requests_in_flight(request_rate=50, output_len=500, tpot_ms=40) == 1000
    assert sustained_rate(in_flight=1000, output_len=500, tpot_ms=40) == 50


@pytest.mark.parametrize(
    ("per_rank", "ranks", "prompts"),
    [(0.0, 8, 0.0), (0.01, 8, 0.08), (0.5, 8, 1.0), (1.0, 8, 1.0), (1.01, 8, 2), (3.0, 1, 3), (0.25, 1, 0.25)],
)
def test_the_fullest_rank_gets_a_second_prompt_when_all_have_one(per_rank: float, ranks: int, prompts: float):
    assert fullest_prompts(per_rank=per_rank, ranks=ranks) == pytest.approx(prompts)


def test_a_request_is_prompt_and_output_and_attends_to_half_of_it():
    goals = Goals(gpus=8, context=2048, output_len=512)
    assert (goals.input_len, goals.mean_context) == (1536, 1792)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus is 0; it must be at least 1, e.g. 8"),
        ({"output_len": 4096}, "output_len is 4096; it must leave room for a prompt in a context of 4096, e.g. 2048"),
        ({"tpot_ms": 0.0}, "tpot_ms is 0.0; it must be a number above 0, e.g. 50"),
        ({"request_rate": float("inf")}, "request_rate is inf; it must be a number above 0"),
    ],
)
def test_an_impossible_goal_is_refused_in_words(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Goals(**{"gpus": 8, "context": 4096, "output_len": 2048, **changes})
