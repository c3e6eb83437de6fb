"""What a user may set, what is refused in words, and what is left to be chosen."""

from __future__ import annotations

import pytest
import torch

from ep import ExchangeConfig, choose


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"combine": "rank"}, "combine = 'rank': must be one of ranks, slots, for example ranks"),
        (
            {"exchange": "fast"},
            "exchange = 'fast': must be one of auto, exact, bounded, nccl_ep, symmetric, for example exact",
        ),
        ({"hierarchical": True}, "hierarchical = True: must be one of auto, on, off, for example on"),
        ({"dispatch_dtype": "int8"}, "dispatch_dtype = 'int8': must be one of run, fp8, for example run"),
        ({"combine_dtype": "fp8"}, "combine_dtype = 'fp8': must be one of run, float32, for example run"),
        ({"round_tokens": 0}, "round_tokens = 0: must be at least 1, for example 1024"),
    ],
)
def test_a_wrong_config_is_refused_in_words(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ExchangeConfig(**fields)


@pytest.mark.parametrize("round_tokens", [10**21, 10**400, (1 << 20) + 1])
def test_a_round_of_too_many_tokens_is_refused_with_field_value_and_rule(round_tokens):
    with pytest.raises(ValueError, match=r"^round_tokens = 10\d*\.*\d*: must be at most 1048576, for example 1024$"):
        ExchangeConfig(round_tokens=round_tokens)


@pytest.mark.parametrize(("field", "value"), [("dispatch_dtype", "fp8"), ("combine_dtype", "float32")])
def test_a_float64_run_refuses_narrower_rows(field, value):
    config = ExchangeConfig(**{field: value})
    with pytest.raises(
        ValueError, match=f"^{field} = '{value}': in a float64 run nothing is narrower; it must be run$"
    ):
        config.refuse_narrow(torch.float64)
    config.refuse_narrow(torch.bfloat16)


def test_what_is_left_open_is_chosen_and_what_is_set_stays():
    assert not ExchangeConfig().is_settled
    chosen = choose(ExchangeConfig(hierarchical="off", round_tokens=7), exchange="bounded", hierarchical="on")
    assert chosen == ExchangeConfig(exchange="bounded", hierarchical="off", round_tokens=7)
    assert chosen.is_settled


def test_an_exchange_is_not_built_from_what_is_left_open(make):
    class Alone:
        rank, size = 0, 1

    with pytest.raises(AssertionError, match="what is auto has to be chosen before"):
        make(Alone(), num_slots=2, exchange="auto")
