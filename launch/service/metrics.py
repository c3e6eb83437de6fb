"""What Prometheus is told: what the service counts itself, and what the ranks last said, under the names people scrape.

    vllm:*      what vLLM measures too, under its names and labels (`engine` is the rank)
    serried:*   what only lockstep ranks have

Counting costs a token well under a microsecond: plain numbers here, families only when somebody scrapes. Knows the
group by `front_client`; does not know gRPC or HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..front.front_client import GroupClient, GroupInfo
from .metrics_ranks import rank_families
from .metrics_values import counter, gauge

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)


class Tally:
    """A histogram that is cheap to add to: one count a bucket, and the sum."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._about = about
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """`value` counts for the first bound that is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, model: str) -> Metric:
        """As Prometheus wants it: each bucket holds those before it, too."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._about, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class RequestClock:
    """When the tokens of one request left the server."""

    def __init__(self, metrics: ServiceMetrics, num_prompt_tokens: int, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._num_prompt_tokens = num_prompt_tokens
        self._began = clock()
        self._first: float | None = None
        self._last: dict[int, float] = {}

    def told(self, index: int, num_tokens: int) -> None:
        """A message with new tokens of choice `index`."""
        now = self._clock()
        if self._first is None:
            self._first = now
            self._metrics.first_token.add(now - self._began)
        if (last := self._last.get(index)) is not None:
            self._metrics.between_tokens.add(now - last)
        self._last[index] = now
        self._metrics.generation_tokens += num_tokens

    def ended(self, reason: str, num_tokens: int) -> None:
        """One choice has come to its end."""
        now = self._clock()
        self._metrics.finished[reason] += 1
        self._metrics.whole_request.add(now - self._began)
        self._metrics.tokens_of_answer.add(num_tokens)
        if num_tokens > 1 and self._first is not None:
            self._metrics.a_token.add((now - self._first) / (num_tokens - 1))


class ServiceMetrics(Collector):
    """All of one server's metrics, in a registry of their own."""

    def __init__(self, client: GroupClient, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._client = client
        self._clock = clock
        self._info: GroupInfo | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.refused: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token = Tally("vllm:time_to_first_token_seconds", "From the request to its first token.", FIRST_S)
        self.between_tokens = Tally("vllm:inter_token_latency_seconds", "From message to message.", SHORT_S)
        self.a_token = Tally("vllm:request_time_per_output_token_seconds", "After the first, by request.", SHORT_S)
        self.whole_request = Tally("vllm:e2e_request_latency_seconds", "From the request to its end.", LONG_S)
        self.tokens_of_prompt = Tally("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.tokens_of_answer = Tally("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.registry.register(self)

    def begin(self, num_prompt_tokens: int) -> RequestClock:
        """A request was let in."""
        self.prompt_tokens += num_prompt_tokens
        self.tokens_of_prompt.add(num_prompt_tokens)
        return RequestClock(self, num_prompt_tokens, self._clock)

    def ready(self, info: GroupInfo) -> None:
        """What the group is, once that is known."""
        self._info = info

    def text(self) -> bytes:
        """As a scrape gets it."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry; see `Collector`."""
        model = self._info.served_model_name if self._info else ""
        yield counter("vllm:prompt_tokens", "Tokens of prompts that were let in.", {(model,): self.prompt_tokens})
        yield counter("vllm:generation_tokens", "Tokens sent.", {(model,): self.generation_tokens})
        yield counter(
            "vllm:request_success",
            "Answers that came to their end.",
            {(reason, model): count for reason, count in self.finished.items()},
            labels=("finished_reason", "model_name"),
        )
        for name, about, counts in (
            ("serried:requests_refused", "Requests that were not let in, or were dropped.", self.refused),
            ("serried:requests_aborted", "Requests that somebody gave up.", self.aborted),
        ):
            yield counter(name, about, {(reason,): count for reason, count in counts.items()}, labels=("reason",))
        for tally in (
            self.first_token,
            self.between_tokens,
            self.a_token,
            self.whole_request,
            self.tokens_of_prompt,
            self.tokens_of_answer,
        ):
            yield tally.family(model)
        yield from self._of_the_group(model)

    def _of_the_group(self, model: str) -> Iterator[Metric]:
        health = self._client.health()
        states = ("starting", "ready", "draining", "failed")
        yield gauge(
            "serried:group_state",
            "1 for the state that the group is in.",
            {(state,): float(state == health.state) for state in states},
            labels=("state",),
        )
        if health.last_step_age_s is not None:
            age = {(): health.last_step_age_s}
            yield gauge("serried:last_step_age_seconds", "Since a step ended anywhere.", age, labels=())
        if self._info is not None:
            yield from _facts(self._info)
            yield from rank_families(self._client.loads(), self._client.stats(), model)


def _facts(info: GroupInfo) -> Iterator[Metric]:
    """What does not change while the group lives, as labels of a 1."""
    cache = (str(info.block_size), str(sum(info.pages_per_rank)), info.kv_cache_dtype)
    labels = ("block_size", "num_gpu_blocks", "cache_dtype")
    yield gauge("vllm:cache_config_info", "The latent cache of all ranks.", {cache: 1.0}, labels=labels)
    build = (info.version, info.commit, info.config_hash)
    labels = ("version", "commit", "config_hash")
    yield gauge("serried:build_info", "What runs.", {build: 1.0}, labels=labels)
    phases = {(phase,): seconds for phase, seconds in info.startup_s.items()}
    yield gauge("serried:startup_seconds", "What the start took, by phase.", phases, labels=("phase",))
