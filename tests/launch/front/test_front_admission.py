"""Who is let in: by tokens that wait, pages that may be asked for, and number; and when to come again."""

from __future__ import annotations

import pytest

from launch.front.front_admission import Gate, Rate
from launch.front.front_client import Refused
from launch.front.front_config import FrontConfig
from runtime.ranks.placing import FrontDesk
from runtime.ranks.routing import RoutingConfig
from runtime.requests.admission import Capacity
from runtime.requests.outputs import News
from runtime.requests.request import Request
from runtime.requests.sampling_params import SamplingParams


def desk_with(*prompts: int) -> FrontDesk:
    """Two ranks of 10 pages of 4 tokens; requests of such prompts and as much output are on rank 0."""
    capacity = Capacity(max_model_len=40, num_pages=10, page_size=4)
    desk = FrontDesk([capacity] * 2, RoutingConfig(), caches_prefixes=False)
    for number, prompt in enumerate(prompts):
        desk.book(request_of(prompt, str(number)), 0)
    return desk


def request_of(prompt: int, name: str = "x") -> Request:
    return Request(id=name, prompt=(1,) * prompt, params=SamplingParams(max_tokens=prompt), arrival=0)


def refusal(gate: Gate, **asked: int) -> Refused:
    with pytest.raises(Refused) as caught:
        gate.check(**({"tokens": 1, "pages": 1, "requests": 1, "num_open": 1} | asked))
    return caught.value


def test_an_empty_house_takes_whatever_can_run():
    gate = Gate(FrontConfig(max_queued_tokens=1, max_cache_demand=0.1), desk_with(), clock=lambda: 0.0)
    gate.check(tokens=1000, pages=1000, requests=9, num_open=0)


def test_tokens_that_wait_are_bounded():
    gate = Gate(FrontConfig(max_queued_tokens=12), desk_with(8), clock=lambda: 0.0)
    gate.check(tokens=4, pages=1, requests=1, num_open=1)
    refused = refusal(gate, tokens=5)
    assert refused.reason == "queue_tokens"
    assert "8 prompt tokens wait, and 5 more would exceed 12" in refused.detail


def test_a_prompt_that_is_computed_waits_no_more():
    desk = desk_with(8)
    desk.hear(News("0", (1,), None, None, 0, 0))
    Gate(FrontConfig(max_queued_tokens=12), desk, clock=lambda: 0.0).check(tokens=12, pages=1, requests=1, num_open=1)


def test_pages_that_may_be_asked_for_are_bounded():
    gate = Gate(FrontConfig(max_cache_demand=0.5), desk_with(8), clock=lambda: 0.0)
    gate.check(tokens=1, pages=6, requests=1, num_open=1)
    assert refusal(gate, pages=7).reason == "queue_pages"


def test_the_number_of_requests_is_bounded():
    gate = Gate(FrontConfig(max_open_requests=3), desk_with(), clock=lambda: 0.0)
    gate.check(tokens=1, pages=1, requests=1, num_open=2)
    assert refusal(gate, requests=2, num_open=2).reason == "queue_requests"


def test_the_hint_follows_from_how_fast_the_queue_moves():
    now = [0.0]
    gate = Gate(FrontConfig(max_queued_tokens=8), desk_with(8), clock=lambda: now[0])
    assert refusal(gate, tokens=100).retry_after_s == 1.0
    now[0] = 1.0
    gate.moved(tokens=50, pages=0)
    assert refusal(gate, tokens=100).retry_after_s == pytest.approx(2.0)
    assert refusal(gate, tokens=100_000).retry_after_s == 30.0
    assert refusal(gate, tokens=1).retry_after_s == pytest.approx(0.1)


def test_a_rate_forgets_what_is_long_ago():
    now = [0.0]
    rate = Rate(lambda: now[0])
    rate.add(10)
    now[0] = 2.0
    assert rate.per_s == pytest.approx(5.0)
    now[0] = 10.0
    assert rate.per_s == 0.0


@pytest.mark.parametrize(
    "field", ["max_queued_tokens", "max_open_requests", "stream_interval", "outbox_tokens", "max_cache_demand"]
)
def test_a_limit_that_lets_nobody_in_is_refused_by_name(field: str):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        FrontConfig(**{field: 0})
