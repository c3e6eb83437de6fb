"""Settings that are each legal and make no sense together: a sentence each, with the numbers that say so.

Knows a situation: the settings, the model, the device and what it costs. What is plainly wrong is refused where it is
set; what is said here runs, and wastes something.
"""

from __future__ import annotations

from collections.abc import Callable

from dbo import DboConfig
from runtime.settings.decisions import run_dtype
from runtime.weights.memory import gib

from .plan_experts import (
    copies_of_all,
    copies_uneven,
    copies_useless,
    eplb_alone,
    eplb_missing,
    eplb_too_slow,
    window_too_long,
)
from .plan_situation import Situation

Judge = Callable[[Situation], str | None]


def warnings_of(situation: Situation) -> list[str]:
    """All that makes no sense, in the order of JUDGES."""
    return [said for judge in JUDGES if (said := judge(situation))]


def _overlap_alone(case: Situation) -> str | None:
    if case.config.overlap.dbo == "off" or case.config.ranks > 1:
        return None
    return f"--dbo {case.config.overlap.dbo} with one rank: there is no exchange to hide; leave it off"


def _overlap_slower(case: Situation) -> str | None:
    overlap = case.config.overlap
    if overlap.dbo != "on" or case.config.ranks == 1:
        return None
    whole_ms, cut_ms = case.step_ms(), case.step_ms(tracks=overlap.dbo_tracks)
    if cut_ms <= whole_ms:
        return None
    return (
        f"--dbo on: {case.batch} requests a rank take {cut_ms:.1f} ms in {overlap.dbo_tracks} parts and {whole_ms:.1f} "
        "ms whole, for every weight is read once a part; use --dbo auto, or off"
    )


def _overlap_never(case: Situation) -> str | None:
    overlap, most = case.config.overlap, case.config.scheduler.max_num_seqs
    if overlap.dbo == "off" or overlap.dbo_decode_token_threshold <= most:
        return None
    return (
        f"--dbo-decode-token-threshold {overlap.dbo_decode_token_threshold} is above --max-num-seqs {most}: no step "
        "that decodes is ever cut"
    )


def _comm_sms_unused(case: Situation) -> str | None:
    overlap = case.config.overlap
    if overlap.comm_sms == DboConfig().comm_sms or (overlap.dbo != "off" and case.on_gpu):
        return None
    why = "steps are not cut (--dbo off)" if case.on_gpu else "a CPU has no multiprocessors"
    return f"--comm-sms {overlap.comm_sms} has no effect: {why}"


def _by_node_on_one(case: Situation) -> str | None:
    if case.config.exchange.hierarchical != "on" or case.nodes > 1:
        return None
    return (
        f"--hierarchical on with {case.config.ranks} ranks on one node: rows make a second trip and no network is "
        "spared; use auto"
    )


def _straight_over_nodes(case: Situation) -> str | None:
    if case.config.exchange.hierarchical != "off" or case.nodes == 1 or case.model.moe is None:
        return None
    straight_ms, by_node_ms = [case.step_ms(hierarchical=through) for through in (False, True)]
    if by_node_ms * 1.05 > straight_ms:
        return None
    return (
        f"--hierarchical off over {case.nodes} nodes: a step takes {straight_ms:.1f} ms, and {by_node_ms:.1f} ms "
        "when a "
        "token travels once to each node; use auto"
    )


def _nodes_not_filled(case: Situation) -> str | None:
    size = case.config.node_size
    if size is None or case.config.ranks <= size or case.config.ranks % size == 0:
        return None
    return (
        f"{case.config.ranks} ranks do not fill nodes of {size}: rows cannot go by node, and the last node's ranks "
        "send "
        f"more than others; use {case.config.ranks // size * size} or {-(-case.config.ranks // size) * size} ranks"
    )


def _beat_alone(case: Situation) -> str | None:
    interval = case.config.cadence.prefill_schedule_interval
    if interval == 1 or case.config.ranks > 1:
        return None
    return f"--prefill-schedule-interval {interval} with one rank: there is nobody to wait for, and prompts come later"


def _beat_too_late(case: Situation) -> str | None:
    interval = case.config.cadence.prefill_schedule_interval
    if case.ttft_ms is None or interval == "auto" or interval == 1:
        return None
    wait_ms = (interval - 1) * case.step_ms()
    if wait_ms <= case.ttft_ms:
        return None
    return (
        f"--prefill-schedule-interval {interval}: a prompt waits up to {wait_ms:,.0f} ms for its step, longer than "
        f"--ttft-ms {case.ttft_ms:g}"
    )


def _target_below_step(case: Situation) -> str | None:
    target = case.config.cadence.itl_target_ms
    if target is None or target > (step_ms := case.step_ms()):
        return None
    return (
        f"--itl-target-ms {target:g}: a step of {case.batch} requests without any prompt takes {step_ms:.1f} ms, so "
        "prompts always get the least there is"
    )


def _cache_too_small(case: Situation) -> str | None:
    most = case.config.scheduler.max_num_seqs
    cached = case.plan.concurrent_requests(min(case.context, case.plan.numbers.max_model_len))
    if cached >= most:
        return None
    return (
        f"--max-num-seqs {most}: the cache holds {cached} requests of {case.context:,} tokens; the others are "
        "preempted and computed again when they grow"
    )


def _rounds(case: Situation) -> str | None:
    most, rows = case.config.scheduler.max_num_seqs, case.config.exchange.round_tokens
    if case.config.ranks == 1 or most <= rows:
        return None
    return f"--max-num-seqs {most} is above --round-tokens {rows}: every exchange of a full step goes in rounds"


def _step_too_small(case: Situation) -> str | None:
    scheduler = case.config.scheduler
    tokens, most = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    if tokens >= most:
        return None
    return (
        f"--max-num-batched-tokens {tokens} is below --max-num-seqs {most}: not all requests that run get a token in a "
        "step"
    )


def _step_too_long(case: Situation) -> str | None:
    most = case.config.scheduler.max_num_batched_tokens
    if case.tpot_ms is None or case.config.cadence.itl_target_ms is not None:
        return None
    full_ms = case.prompts_ms(most)
    if full_ms <= 20 * case.tpot_ms:
        return None
    return (
        f"--max-num-batched-tokens {most}: a step full of prompts takes {full_ms:,.0f} ms, "
        f"{full_ms / case.tpot_ms:.0f} times --tpot-ms {case.tpot_ms:g}, and all ranks' requests wait for it; lower "
        "it, or give --itl-target-ms"
    )


def _longest_unused(case: Situation) -> str | None:
    longest = case.config.scheduler.max_model_len
    if longest is None or longest < 16 * case.context:
        return None
    return (
        f"--max-model-len {longest}: {longest // case.context} times the context planned for; tables for it take "
        f"{gib(case.plan.workspaces.token_table)} of each rank"
    )


def _page_too_large(case: Situation) -> str | None:
    size = case.config.cache.block_size
    if 2 * size <= case.context:
        return None
    return f"--block-size {size}: a request of {case.context} tokens leaves most of its last page empty; 64 is usual"


def _fp8_rows(case: Situation) -> str | None:
    if case.config.exchange.dispatch_dtype != "fp8" or case.model.quantization is not None:
        return None
    return "--dispatch-dtype fp8: this model's experts are not in fp8, so rows are rounded that they would take exactly"


def _wide_rows(case: Situation) -> str | None:
    if case.config.exchange.combine_dtype != "float32" or run_dtype(case.config, case.model).itemsize >= 4:
        return None
    return "--combine-dtype float32: rows on their way back are twice as long; sums are in float32 either way"


def _rows_by_slot(case: Situation) -> str | None:
    if case.config.exchange.combine != "slots" or case.nodes == 1:
        return None
    return (
        f"--combine slots over {case.nodes} nodes: a row returns for each expert, not for each rank, over the network; "
        "only who needs results that do not depend on where experts sit should pay for it"
    )


def _host_exposed(case: Situation) -> str | None:
    if not case.on_gpu or case.config.async_depth:
        return None
    return "--async-depth 0 on a GPU: it idles while the host reads tokens and prepares each step"


def _counted_on_gpu(case: Situation) -> str | None:
    if not case.on_gpu or case.config.exchange.exchange != "exact" or case.config.ranks == 1:
        return None
    return "--exchange exact on a GPU: the host reads counts in every layer, so no step can be captured; use bounded"


def _torch_on_gpu(case: Situation) -> str | None:
    if not case.on_gpu or case.config.ops != "reference":
        return None
    return "--ops reference on a GPU: torch's operations, which wait for the host; they are meant to compare with"


def _wide_run(case: Situation) -> str | None:
    size = run_dtype(case.config, case.model).itemsize
    if not case.on_gpu or size < 4:
        return None
    return f"--dtype {case.config.dtype} on a GPU: {size} bytes a number, for weights, cache and rows alike; to compare"


def _memory_share(case: Situation) -> str | None:
    share = case.config.cache.gpu_memory_utilization
    if not case.on_gpu or 0.5 <= share <= 0.95:
        return None
    left = "nothing is left for the driver, libraries and gaps" if share > 0.95 else "half of the device stays unused"
    return f"--gpu-memory-utilization {share:g}: {left}; 0.92 is usual"


def _goal_below_floor(case: Situation) -> str | None:
    if case.tpot_ms is None or case.tpot_ms >= (floor_ms := case.step_ms(batch=1)):
        return None
    return (
        f"--tpot-ms {case.tpot_ms:g}: a step of one request a rank takes {floor_ms:.1f} ms; more ranks make it shorter"
    )


JUDGES: tuple[Judge, ...] = (
    _overlap_alone, _overlap_slower, _overlap_never, _comm_sms_unused, _by_node_on_one, _straight_over_nodes,
    _nodes_not_filled, eplb_alone, eplb_missing, copies_uneven, copies_useless, copies_of_all, eplb_too_slow,
    window_too_long, _beat_alone, _beat_too_late, _target_below_step, _cache_too_small, _rounds, _step_too_small,
    _step_too_long, _longest_unused, _page_too_large, _fp8_rows, _wide_rows, _rows_by_slot, _host_exposed,
    _counted_on_gpu, _torch_on_gpu, _wide_run, _memory_share, _goal_below_floor,
)  # fmt: skip
