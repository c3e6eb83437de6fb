"""Figures of a run against numbers worked out by hand."""

from __future__ import annotations

import pytest

from runtime.bench.serving_metrics import serving_figures, steady_figures, steady_window, token_hash
from runtime.bench.workload_run import RequestTimes, Run
from runtime.requests.request import FinishReason


def request(arrived: float, *tokens: float, rank: int = 0, prompt: int = 4, failed: bool = False) -> RequestTimes:
    return RequestTimes(
        prompt_len=prompt,
        arrived_s=arrived,
        rank=rank,
        tokens_s=list(tokens),
        token_ids=[7] * len(tokens),
        finish_reason=FinishReason.ERROR if failed else FinishReason.LENGTH,
    )


def run_of(*requests: RequestTimes, begin: float = 10.0, end: float = 20.0) -> Run:
    return Run(requests=requests, begin_s=begin, end_s=end)


TWO = run_of(request(10, 11, 12, 14), request(10, 13, 14, 15, 20, prompt=6))


def test_the_figures_of_two_requests_are_those_worked_out_by_hand():
    found = serving_figures(TWO, ranks=2)
    expected = {
        "duration": 10.0, "completed": 2, "failed": 0, "total_input_tokens": 10, "total_output_tokens": 7,
        "request_throughput": 0.2, "output_throughput": 0.7, "total_token_throughput": 1.7,
        "output_throughput_per_gpu": 0.35, "total_token_throughput_per_gpu": 0.85, "max_output_tokens_per_s": 2.0,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 2000.0, "median_ttft_ms": 2000.0, "std_ttft_ms": 1000.0, "p90_ttft_ms": 2800.0,
        "mean_tpot_ms": (1500 + 7000 / 3) / 2,
        "mean_itl_ms": (1 + 2 + 1 + 1 + 5) * 200.0, "median_itl_ms": 1000.0,
        "mean_e2el_ms": 7000.0, "p99_e2el_ms": 4000 + 0.99 * 6000,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["percentiles"]["e2el"][0] == 4000.0
    assert found["percentiles"]["e2el"][-1] == 10_000.0


def test_a_failed_request_is_counted_and_adds_nothing():
    found = serving_figures(run_of(request(10, 12, 13), request(10, 11, failed=True)), ranks=1)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 1, 2)
    assert found["mean_ttft_ms"] == 2000.0


def test_without_any_answer_there_are_no_latencies():
    found = serving_figures(run_of(request(10, failed=True)), ranks=1)
    assert found["mean_ttft_ms"] is None
    assert found["p99_tpot_ms"] is None
    assert found["output_throughput"] == 0.0


def test_single_tokens_have_a_latency_but_no_time_between_them():
    found = serving_figures(run_of(request(10, 12)), ranks=1)
    assert (found["mean_ttft_ms"], found["mean_tpot_ms"], found["mean_itl_ms"]) == (2000.0, None, None)


def test_the_steady_window_leaves_out_ramp_and_tail():
    ramp = [request(0, 1 + n, 30 + n) for n in range(10)]  # ten decode at once from 10 to 30
    window = steady_window(ramp)
    assert window is not None
    assert (window.begin_s, window.end_s, window.decoding) == (9.0, 31.0, 10), "nine of ten are enough"


def test_a_single_request_is_steady_from_its_first_to_its_last_token():
    window = steady_window([request(0, 5, 6, 7)])
    assert window is not None
    assert (window.begin_s, window.end_s, window.decoding) == (5.0, 7.0, 1)
    assert window.holds(7.0)
    assert not window.holds(5.0), "what led to it lies before the window"


@pytest.mark.parametrize("requests", [[], [request(0, 5)], [request(0, 5, 5)]])
def test_without_two_moments_there_is_no_steady_part(requests: list[RequestTimes]):
    assert steady_window(requests) is None
    assert steady_figures(run_of(*requests), None, ranks=1) == {"steady": None}


def test_steady_rates_are_counted_by_rank_and_by_user():
    requests = [request(0, *range(10, 21), rank=0), request(0, *range(10, 21, 2), rank=1)]
    found = steady_figures(run_of(*requests, begin=0, end=25), steady_window(requests), ranks=2)["steady"]
    assert (found["begin_s"], found["end_s"], found["decoding"]) == (10.0, 20.0, 2)
    assert found["output_tokens"] == 15
    assert found["output_throughput"] == pytest.approx(1.5)
    assert found["output_throughput_per_gpu"] == pytest.approx(0.75)
    ranks = [found[f"rank_throughput_{name}"] for name in ("min", "median", "max")]
    assert ranks == pytest.approx([0.5, 0.75, 1.0])
    assert found["tokens_per_s_per_user"] == pytest.approx(15 / 20)
    assert sum(found["slices"]) / 10 == pytest.approx(1.5)


def test_a_rank_without_requests_counts_as_none():
    requests = [request(0, 1, 2, 3)]
    found = steady_figures(run_of(*requests), steady_window(requests), ranks=2)["steady"]
    assert found["rank_throughput_min"] == 0.0


def test_the_hash_tells_tokens_apart_and_whose_they_are():
    a, b = request(0, 1, 2), request(0, 1)
    same = [request(5, 6, 7, rank=1), request(5, 6)]
    assert token_hash([a, b]) == token_hash(same), "only tokens count"
    assert token_hash([a, b]) != token_hash([b, a])
    other = request(0, 1, 2)
    other.token_ids = [7, 8]
    assert token_hash([other, b]) != token_hash([a, b])
