from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eplb.stats import RebalanceStats
from launch.front.front_client import Health
from launch.service.metrics import ServiceMetrics, Tally
from runtime.requests.telemetry import RankStats
from tests.launch.fake_group import FakeGroup

VLLM = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:iteration_tokens_total", "vllm:cache_config_info",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}  # fmt: skip
"""Names that people scrape from vLLM."""

RANK = RankStats(
    rank=0, steps=40, idle_steps=10, computed_tokens=300, generated_tokens=90, finished=7, preemptions=2,
    prefix_queries=100, prefix_hits=64, num_pages=8, free_pages=6, running=1, waiting=0, slow_steps=3, degraded=False,
    expert_balance=0.8, overflow_steps=1, rerun_steps=2, network_bytes=1000, node_bytes=2000, mean_pairs=60.0,
    most_pairs=80, experts=RebalanceStats(rebalances=4, bytes_moved=5000), cut_steps=6,
    uncut_steps="3 too small, 2 no gain", deferred_steps=9, token_balance=0.7, replayed_steps=30,
    launched_steps="8 run again exactly, 2 larger than any captured",
)  # fmt: skip


class Ranks(FakeGroup):
    def stats(self):
        return (RANK, replace(RANK, rank=1, idle_steps=0))


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def metrics(now) -> ServiceMetrics:
    group = Ranks("folder")
    metrics = ServiceMetrics(group, clock=lambda: now[0])
    metrics.ready(group.facts)
    return metrics


def scrape(metrics: ServiceMetrics) -> tuple[set[str], dict]:
    """Names of families, and (sample, labels in order) -> value."""
    families = list(text_string_to_metric_families(metrics.text().decode()))
    samples = {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in families
        for sample in family.samples
    }
    return {family.name for family in families}, samples


def test_what_vllm_measures_too_has_its_names(metrics):
    names, samples = scrape(metrics)
    assert names >= VLLM
    assert samples["vllm:num_requests_running", "1"] == 3
    assert samples["vllm:kv_cache_usage_perc", "1"] == 0.75
    assert samples["vllm:num_preemptions_total", "0"] == 2
    assert samples["vllm:prefix_cache_hits_total", "0"] == 64
    assert samples["vllm:iteration_tokens_total_count", "0"] == 40
    assert samples["vllm:iteration_tokens_total_sum", "0"] == 300
    assert samples["vllm:cache_config_info", "16", "auto", "16"] == 1


def test_lockstep_has_names_of_its_own(metrics):
    _, samples = scrape(metrics)
    assert samples["serried:beat_wait_seconds_total", "1"] == 1.5
    assert (samples["serried:idle_step_ratio", "0"], samples["serried:idle_step_ratio", "1"]) == (0.25, 0.0)
    assert samples["serried:expert_balance", "0"] == 0.8
    assert samples["serried:computed_balance",] == 0.75
    assert samples["serried:rerun_steps_total", "0"] == 2
    assert samples["serried:deferred_prefill_steps_total",] == 9
    assert samples["serried:padding_ratio",] == pytest.approx(0.3)
    assert samples["serried:uncut_steps_total", "too small"] == 3
    assert samples["serried:uncut_steps_total", "no gain"] == 2
    assert samples["serried:overflow_steps_total", "0"] == 1
    assert samples["serried:replayed_steps_total", "0"] == 30
    assert samples["serried:launched_steps_total", "0", "larger than any captured"] == 2
    assert (samples["serried:rebalances_total",], samples["serried:rebalance_bytes_total",]) == (4, 5000)
    assert samples["serried:rank_state", "1", "degraded"] == 1
    assert samples["serried:group_state", "ready"] == 1
    assert samples["serried:last_step_age_seconds",] == 0.1
    assert samples["serried:startup_seconds", "import"] == 1.5
    assert samples["serried:build_info", "c0ffee", "abc", "0.1"] == 1


def test_a_request_is_timed_from_its_start_to_its_tokens_and_its_end(metrics, now):
    clock = metrics.begin(30)
    now[0] = 0.05
    clock.told(0, 1)
    now[0] = 0.08
    clock.told(0, 2)
    clock.told(1, 1)
    now[0] = 0.35
    clock.ended("stop", 3)
    clock.ended("length", 1)
    _, samples = scrape(metrics)
    assert (samples["vllm:time_to_first_token_seconds_count",], samples["vllm:time_to_first_token_seconds_sum",]) == (
        1,
        0.05,
    )
    assert samples["vllm:inter_token_latency_seconds_count",] == 1
    assert samples["vllm:inter_token_latency_seconds_sum",] == pytest.approx(0.03)
    assert samples["vllm:request_time_per_output_token_seconds_sum",] == pytest.approx(0.15)
    assert samples["vllm:request_time_per_output_token_seconds_count",] == 1
    assert samples["vllm:e2e_request_latency_seconds_sum",] == pytest.approx(0.7)
    assert samples["vllm:request_success_total", "stop"] == samples["vllm:request_success_total", "length"] == 1
    assert (samples["vllm:prompt_tokens_total",], samples["vllm:generation_tokens_total",]) == (30, 4)
    assert samples["vllm:request_prompt_tokens_sum",] == 30


def test_a_bucket_holds_what_is_at_most_its_bound():
    tally = Tally("t", "about", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        tally.add(value)
    buckets = {s.labels["le"]: s.value for s in tally.family("m").samples if "le" in s.labels}
    assert buckets == {"1.0": 2, "2.0": 4, "+Inf": 5}


def test_before_the_group_is_ready_there_is_what_the_service_counts():
    group = FakeGroup("folder")
    group.state = Health(state="starting")
    metrics = ServiceMetrics(group)
    metrics.refused["not_ready"] += 1
    names, samples = scrape(metrics)
    assert samples["serried:requests_refused_total", "not_ready"] == 1
    assert samples["serried:group_state", "starting"] == 1
    assert "vllm:num_requests_running" not in names


def test_the_text_is_what_scrapers_of_this_format_read(metrics, tmp_path: Path):
    assert metrics.text().endswith(b"\n")
    assert b"# TYPE vllm:time_to_first_token_seconds histogram" in metrics.text()
