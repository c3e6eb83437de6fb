"""The ranks' own numbers as Prometheus families: their queues and caches, and how level and in step they are.

Knows what ranks tell (`RankLoad` every moment, `RankStats` their counters); does not know the service.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

from runtime.requests.telemetry import RankStats

from ..front.front_client import RankLoad
from .metrics_values import Values, counter, gauge

STATES = ("live", "ready", "degraded", "draining", "failed")
ENGINE = ("engine", "model_name")
RANK = ("rank",)


def rank_families(loads: Sequence[RankLoad], stats: Sequence[RankStats], model: str) -> Iterator[Metric]:
    """Everything the ranks last said."""
    yield from _queues(loads, model)
    yield from _counters(stats, model)
    yield from _lockstep(stats)
    yield from _experts(stats)
    yield from _latents(stats)
    by_state = {(str(load.rank), state): float(state == load.state) for load in loads for state in STATES}
    yield gauge("serried:rank_state", "1 for the state that a rank is in.", by_state, labels=("rank", "state"))
    waits = {(str(load.rank),): load.beat_wait_s for load in loads}
    yield counter(
        "serried:beat_wait_seconds", "Waited for others' votes; the slow rank waits least.", waits, labels=RANK
    )
    ages = {(str(load.rank),): load.last_step_age_s for load in loads if load.last_step_age_s is not None}
    yield gauge("serried:rank_last_step_age_seconds", "Since this rank ended a step.", ages, labels=RANK)


def _queues(loads: Sequence[RankLoad], model: str) -> Iterator[Metric]:
    def by_rank(name: str) -> Values:
        return {(str(load.rank), model): getattr(load, name) for load in loads}

    yield gauge("vllm:num_requests_running", "Requests in the steps.", by_rank("running"), labels=ENGINE)
    yield gauge("vllm:num_requests_waiting", "Requests that wait for room.", by_rank("waiting"), labels=ENGINE)
    used = {(str(load.rank), model): load.used_pages / max(load.num_pages, 1) for load in loads}
    yield gauge("vllm:kv_cache_usage_perc", "Share of the pages in use; 1 is all.", used, labels=ENGINE)
    yield gauge("serried:waiting_tokens", "Prompt tokens of those.", by_rank("waiting_tokens"), labels=ENGINE)
    yield gauge("serried:gen_tokens_per_second", "Lately.", by_rank("gen_tokens_per_s"), labels=ENGINE)


def _counters(stats: Sequence[RankStats], model: str) -> Iterator[Metric]:
    for name, field, about in (
        ("vllm:num_preemptions", "preemptions", "Requests that gave their pages back for a while."),
        ("vllm:prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
        ("vllm:prefix_cache_hits", "prefix_hits", "Prompt tokens found there."),
    ):
        yield counter(name, about, {(str(rank.rank), model): getattr(rank, field) for rank in stats}, labels=ENGINE)
    # One bucket: ranks keep sums only. Its count, the steps, is what people scrape as a heartbeat.
    steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=ENGINE)
    for rank in stats:
        steps.add_metric([str(rank.rank), model], [("+Inf", rank.steps)], rank.computed_tokens)
    yield steps


def _latents(stats: Sequence[RankStats]) -> Iterator[Metric]:
    """From and to elsewhere (see `hand_over`)."""
    for name, field, about in (
        ("serried:kv_loads", "loads", "Requests whose latents were fetched and found right."),
        ("serried:kv_loaded_tokens", "loaded_tokens", "Tokens that needed no computing for it."),
        ("serried:kv_loaded_bytes", "loaded_bytes", "Bytes of those latents."),
        ("serried:kv_load_seconds", "load_s", "From room for them to found right."),
        ("serried:kv_load_failures", "failures", "Fetches that failed, were late, or brought other latents."),
        ("serried:kv_lent", "lent", "Prompts kept for other engines to fetch."),
    ):
        yield counter(name, about, {(str(rank.rank),): getattr(rank.kv, field) for rank in stats}, labels=RANK)
    held = {(str(rank.rank),): rank.lent_pages for rank in stats}
    yield gauge("serried:kv_lent_pages", "Held for others, or for latents on their way.", held, labels=RANK)


def _lockstep(stats: Sequence[RankStats]) -> Iterator[Metric]:
    for name, field, about in (
        ("serried:steps", "steps", "Steps that ran the layers."),
        ("serried:idle_steps", "idle_steps", "Those without a token of this rank."),
        ("serried:rerun_steps", "rerun_steps", "Steps run again because rows did not fit."),
        ("serried:overflow_steps", "overflow_steps", "Launches in which rows of this rank did not fit."),
        ("serried:slow_steps", "slow_steps", "Steps in which others waited for this rank without cause."),
        ("serried:cut_steps", "cut_steps", "Steps in several micro-batches."),
        ("serried:replayed_steps", "replayed_steps", "Steps replayed as graphs."),
        ("serried:network_bytes", "network_bytes", "Sent to other nodes by the exchange."),
        ("serried:node_bytes", "node_bytes", "Sent to ranks of the same node by the exchange."),
    ):
        yield counter(name, about, {(str(rank.rank),): getattr(rank, field) for rank in stats}, labels=RANK)
    if stats:  # what is the same on all ranks
        yield counter(
            "serried:deferred_prefill_steps",
            "Steps in which some rank's prompts were put off.",
            {(): stats[0].deferred_steps},
            labels=(),
        )
        padding = {(): 1.0 - stats[0].token_balance}
        yield gauge("serried:padding_ratio", "Share of the steps' room that no token fills.", padding, labels=())
        uncut = {(reason,): count for count, reason in _uncut(stats[0].uncut_steps)}
        yield counter("serried:uncut_steps", "Steps that were not cut, by reason.", uncut, labels=("reason",))
    launched = {(str(rank.rank), why): count for rank in stats for count, why in _uncut(rank.launched_steps)}
    why = "Steps launched kernel by kernel where others are replayed, by reason."
    yield counter("serried:launched_steps", why, launched, labels=(*RANK, "reason"))
    idle = {(str(rank.rank),): rank.idle_steps / max(rank.steps, 1) for rank in stats}
    yield gauge("serried:idle_step_ratio", "Share of the steps without a token of this rank.", idle, labels=RANK)


def _experts(stats: Sequence[RankStats]) -> Iterator[Metric]:
    level = {(str(rank.rank),): rank.expert_balance for rank in stats}
    yield gauge("serried:expert_balance", "Mean over max of tokens by expert rank; 1 is level.", level, labels=RANK)
    busiest = max((rank.most_pairs for rank in stats), default=0)
    if busiest:
        share = {(): stats[0].mean_pairs / busiest}
        yield gauge("serried:computed_balance", "Mean over max of the experts' work, by step.", share, labels=())
    for name, field, about in (
        ("serried:rebalances", "rebalances", "Migrations of experts that came to their end."),
        ("serried:rebalance_bytes", "bytes_moved", "Bytes of experts that moved."),
    ):
        values = {(): max((getattr(rank.experts, field) for rank in stats), default=0)}
        yield counter(name, about, values, labels=())


def _uncut(words: str) -> list[tuple[int, str]]:
    """`3 too small, 2 no gain` as counts and reasons (see `runtime.scheduling.overlap.uncut_words`)."""
    parts = [part.partition(" ") for part in words.split(", ") if part]
    return [(int(count), reason) for count, _, reason in parts]
