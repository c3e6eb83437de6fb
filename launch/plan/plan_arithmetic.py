"""From bytes to requests to milliseconds to GPUs: the sums behind a recommended deployment, a line each.

Every line can be checked by hand with those above it; nothing is decided here.
"""

from __future__ import annotations

import math

from attention_mla import MlaConfig
from runtime.costs.roofline import CostShape
from runtime.planning.deployments import Point, Site
from runtime.planning.goals import Goals, requests_in_flight, sustained_rate
from runtime.settings.config import EngineConfig
from runtime.weights.memory import gib, pages_of

_FP8_BLOCK = 128


def arithmetic(site: Site, goals: Goals, point: Point | None, *, why: str) -> list[str]:
    """All of it; without a point only what is wanted."""
    lines = [_wanted(site, goals), _times(site, point.config if point is not None else site.base, why)]
    if point is None:
        return lines
    return [
        *lines,
        f"recommended         {settings_line(point)}",
        *_bytes(site, goals, point),
        *_step(site, goals, point),
        *_prompts(goals, point),
        *_flow(goals, point),
    ]


def settings_line(point: Point) -> str:
    """What is chosen, in words."""
    config, ranks, interval = point.config, point.config.ranks, point.interval
    return (
        f"groups of {ranks} rank{_s(ranks)}, {point.batch} request{_s(point.batch)} a rank, "
        f"{config.eplb.num_redundant_experts} redundant experts, latents in {cache_dtype(config)}, "
        f"--dbo {config.overlap.dbo}, prompts every {interval} step{_s(interval)}"
    )


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def cache_dtype(config: EngineConfig) -> str:
    """Number format of latents."""
    named = config.cache.kv_cache_dtype
    if named != "auto":
        return named
    return "bfloat16" if config.dtype == "auto" else config.dtype


def _wanted(site: Site, goals: Goals) -> str:
    limits = [f"{name} <= {goal:g} ms" for name, goal in (("TPOT", goals.tpot_ms), ("TTFT", goals.ttft_ms)) if goal]
    if goals.request_rate is not None:
        limits.append(f"{goals.request_rate:g} requests/s")
    return (
        f"wanted              {', '.join(limits) or 'throughput'}; requests of {goals.context:,} tokens: "
        f"{goals.input_len:,} in, {goals.output_len:,} out; {goals.gpus} x {site.costs.hardware.name}, "
        f"{goals.node_size} a node; prompts computed {goals.prefill}"
    )


def _times(site: Site, config: EngineConfig, why: str) -> str:
    source = site.costs.source(CostShape.of(site.model, fp8_cache=config.cache.is_fp8))
    return f"times from          {source}; divided by {site.efficiency:.2f}: {why}"


def _bytes(site: Site, goals: Goals, point: Point) -> list[str]:
    plan, numbers, model = point.plan, point.plan.numbers, site.model
    pages = pages_of(goals.context, numbers.page_size)
    cached = plan.concurrent_requests(goals.context)
    left = plan.budget_bytes - plan.weights.total - plan.workspaces.total
    fits = left // (pages * plan.page_bytes)
    is_fp8, number_bytes = numbers.fp8_cache, plan.kv_bytes_per_token // (model.num_layers * model.mla.latent_width)
    per_layer = f"({_fp8_sum(model.mla)})" if is_fp8 else f"{model.mla.latent_width} x {number_bytes} B"
    lines = [
        f"a token's latents   {model.num_layers} layers x {per_layer} = {plan.kv_bytes_per_token:,} B",
        f"a request's         {pages} pages x {numbers.page_size} tokens x {plan.kv_bytes_per_token:,} B = "
        f"{gib(pages * plan.page_bytes)}",
        f"left for them       {gib(numbers.device_bytes)} x {numbers.gpu_memory_utilization:g} - weights "
        f"{gib(plan.weights.total)} - workspaces {gib(plan.workspaces.total)} = {gib(left)}: {fits} requests a rank, "
        f"{point.batch} of them used",
    ]
    if number_bytes == 2 and not is_fp8 and cached:
        fp8 = fp8_token_bytes(site)
        more = left // (pages * numbers.page_size * fp8)
        lines.append(
            f"in fp8              {fp8:,} B a token: {more} requests a rank; worth it only where the cache limits the "
            "batch, or a step reads latents for longer than it computes with them"
        )
    return lines


def _fp8_sum(mla: MlaConfig) -> str:
    """What a token leaves in one layer in fp8: latents, their scales, and the rotary part in bf16."""
    rank = mla.kv_lora_rank
    return f"{rank} + {math.ceil(rank / _FP8_BLOCK)} x 4 B + {mla.qk_rope_head_dim} x 2 B"


def fp8_token_bytes(site: Site) -> int:
    """One token's latents over all layers: fp8 with a float32 scale for each 128, and the rotary part in bf16."""
    latent, rope = site.model.mla.kv_lora_rank, site.model.mla.qk_rope_head_dim
    return site.model.num_layers * (latent + 4 * math.ceil(latent / _FP8_BLOCK) + 2 * rope)


def _step(site: Site, goals: Goals, point: Point) -> list[str]:
    step, parts = point.step, point.tracks
    held = -(-(_experts(site) + point.config.eplb.num_redundant_experts) // point.config.ranks)
    return [
        f"a decode step       {point.batch} requests with {goals.mean_context:,.0f} tokens each, in {parts} "
        f"part{_s(parts)}:",
        f"  attention         {step.attention_us / 1e3:7.2f} ms",
        f"  experts           {step.experts_us / 1e3:7.2f} ms  ({held} a layer here; the fullest rank gets "
        f"{point.imbalance:.2f} times the mean)",
        f"  exchange          {step.exchange_us / 1e3:7.2f} ms  (what is not hidden; blocks have {point.padding:.2f} "
        "times "
        "the rows' room)",
        f"  head and host     {(step.head_us + step.host_us) / 1e3:7.2f} ms",
        f"  together          {step.total_us / 1e3:7.2f} ms / {site.efficiency:.2f} = {point.decode_ms:.1f} ms",
    ]


def _experts(site: Site) -> int:
    return site.model.moe.num_experts if site.model.moe is not None else 0


def _prompts(goals: Goals, point: Point) -> list[str]:
    if goals.prefill == "elsewhere":
        return [f"TPOT                {point.tpot_ms:.1f} ms: no prompt is computed here"]
    steps, per_rank = point.interval, point.interval * point.batch / goals.output_len
    return [
        f"a prompt            {goals.input_len:,} tokens: {point.prompt_ms:,.1f} ms",
        f"prompts a rank      {steps} step{_s(steps)} x {point.batch} / {goals.output_len:,} = "
        f"{per_rank:.2f} on average; the fullest rank's take {point.beat_ms:,.1f} ms",
        f"TPOT                {point.decode_ms:.1f} + {point.beat_ms:,.1f} / {steps} = {point.tpot_ms:.1f} ms",
        f"TTFT                half of {steps - 1} steps, a beat and a step = {point.ttft_ms:,.0f} ms, and no wait "
        "for room",
    ]


def _flow(goals: Goals, point: Point) -> list[str]:
    """Throughput, and Little's law one way or the other."""
    ranks, batch = point.config.ranks, point.batch
    groups = goals.gpus // ranks
    in_flight = groups * ranks * batch
    lines = [
        f"throughput          {batch} / {point.tpot_ms:.1f} ms = {point.tokens_per_gpu:,.0f} tokens/s a GPU, "
        f"{groups * ranks * point.tokens_per_gpu:,.0f} on {groups} x {ranks}; {point.tokens_per_user:.1f} tokens/s a "
        "user",
    ]
    rate = sustained_rate(in_flight=in_flight, output_len=goals.output_len, tpot_ms=point.tpot_ms)
    lines.append(
        f"in flight           {groups} x {ranks} x {batch} = {in_flight:,} requests; Little's law: / "
        f"({goals.output_len:,} x "
        f"{point.tpot_ms:.1f} ms) = {rate:,.1f} requests/s"
    )
    if goals.request_rate is None:
        return lines
    wanted = requests_in_flight(request_rate=goals.request_rate, output_len=goals.output_len, tpot_ms=point.tpot_ms)
    needed = math.ceil(wanted / (ranks * batch)) * ranks
    enough = "enough" if needed <= goals.gpus else f"more than the {goals.gpus} there are"
    lines.append(
        f"GPUs needed         {goals.request_rate:g} requests/s x {goals.output_len:,} tokens x {point.tpot_ms:.1f} "
        "ms = "
        f"{wanted:,.0f} in flight; / {batch} a GPU, in groups of {ranks} = {needed} GPUs: {enough}"
    )
    return lines
