"""What makes no sense about copies of experts, and about moving them: a sentence each. See `plan_warnings`."""

from __future__ import annotations

from dataclasses import replace

from runtime.settings.cost_group import expected_imbalance
from runtime.settings.decisions import run_dtype
from runtime.weights.memory import expert_bytes, gib

from .plan_situation import Situation

WIDE_RANKS = 16
"""From so many ranks on, experts that are loaded unlike cost more than their weights."""


def eplb_alone(case: Situation) -> str | None:
    if not case.config.eplb.enable_eplb or case.config.ranks > 1:
        return None
    return "--enable-eplb with one rank: it holds all experts, and nothing can move; leave it out"


def eplb_missing(case: Situation) -> str | None:
    eplb, moe = case.config.eplb, case.model.moe
    if moe is None or case.config.ranks < WIDE_RANKS or eplb.enable_eplb or eplb.init_placement is not None:
        return None
    imbalance = expected_imbalance(case.settled, case.model, tokens=case.batch)
    return (
        f"{case.config.ranks} ranks without --enable-eplb: with loads as recordings show them, the fullest rank gets "
        f"about {imbalance:.1f} times the mean, and all others wait for it"
    )


def copies_uneven(case: Situation) -> str | None:
    moe, redundant = case.model.moe, case.config.eplb.num_redundant_experts
    if moe is None or not redundant or (moe.num_experts + redundant) % case.config.ranks == 0:
        return None
    more = redundant + -(moe.num_experts + redundant) % case.config.ranks
    return (
        f"{moe.num_experts} experts + --num-redundant-experts {redundant} do not divide by {case.config.ranks} ranks: "
        f"slots stay empty whose memory is taken all the same; {more} fills them"
    )


def copies_useless(case: Situation) -> str | None:
    moe, eplb = case.model.moe, case.config.eplb
    if moe is None or not eplb.num_redundant_experts or case.config.ranks == 1:
        return None
    bare = replace(case.settled, eplb=replace(eplb, num_redundant_experts=0))
    with_ms, without = case.step_ms(), replace(case, config=bare, settled=bare)
    without_ms = without.step_ms(batch=case.batch)
    if without_ms > 1.01 * with_ms:
        return None
    blob = expert_bytes(case.model, dtype_bytes=run_dtype(case.config, case.model).itemsize, keep_fp8=case.on_gpu)
    slots = case.plan.slots_per_rank - -(-moe.num_experts // case.config.ranks)
    return (
        f"--num-redundant-experts {eplb.num_redundant_experts} on {case.config.ranks} ranks: a step takes "
        f"{with_ms:.1f} ms with them and {without_ms:.1f} ms without, and they take "
        f"{gib(slots * blob * len(case.model.moe_layers))} of each rank's cache"
    )


def copies_of_all(case: Situation) -> str | None:
    moe, redundant = case.model.moe, case.config.eplb.num_redundant_experts
    if moe is None or redundant < moe.num_experts:
        return None
    return f"--num-redundant-experts {redundant} is a second copy of all {moe.num_experts} experts; an eighth would do"


def eplb_too_slow(case: Situation) -> str | None:
    eplb, moe = case.config.eplb, case.model.moe
    if not eplb.enable_eplb or moe is None or case.config.ranks == 1:
        return None
    blob = expert_bytes(case.model, dtype_bytes=run_dtype(case.config, case.model).itemsize, keep_fp8=case.on_gpu)
    steps = -(-len(case.model.moe_layers) * blob // eplb.eplb_bytes_per_step)
    if steps <= eplb.eplb_interval:
        return None
    return (
        f"--eplb-bytes-per-step {eplb.eplb_bytes_per_step}: one expert of each layer takes a rank {steps:,} steps to "
        f"move, longer than --eplb-interval {eplb.eplb_interval}; allow more, or look less often"
    )


def window_too_long(case: Situation) -> str | None:
    eplb = case.config.eplb
    if not eplb.enable_eplb or eplb.eplb_window <= eplb.eplb_interval:
        return None
    return (
        f"--eplb-window {eplb.eplb_window} is longer than --eplb-interval {eplb.eplb_interval}: a decision looks at "
        "loads from before the last one, when experts sat elsewhere"
    )
