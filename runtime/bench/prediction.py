"""A measured step beside what the cost model says of it, and how much of a device's peaks it used. Pure arithmetic.

    signed error   (predicted - measured) / measured: below 0, the model is too fast
    MFU            operations that the tokens need, over what the device could do in the step
    MBU            bytes that the step must read, over what it could read: weights of attention and head, of experts
                   only those that some token activates, the latents of every context. Activated bytes as in "MoE-CAP:
                   Benchmarking Cost, Accuracy and Performance of Sparse Mixture-of-Experts Systems",
                   https://arxiv.org/abs/2412.07067; the expected share of experts touched by n tokens is
                   1 - (1 - k / E) ** n

Ranks on one machine may share its cores: what each computes alone, they do one after the other. On a CPU the thread's
own processor time is the better measure: neither waits for the others nor other programs are in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..costs.costs import Operations, StepCosts, StepShape, StepTime
from ..costs.roofline import CostShape
from ..weights.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The average decode step of a rank.

    step_cpu_ms   of its thread's processor time; None where that is not what computes, or only some of it
    tokens        of the fullest rank
    mean_tokens   of the average rank
    sharing       ranks that one device computes one after the other; 1 where each has its own
    """

    step_ms: float
    step_cpu_ms: float | None
    tokens: float
    mean_tokens: float
    context_len: float
    ranks: int
    tracks: int = 1
    sharing: float = 1.0


def predict(operations: Operations, step: MeasuredStep) -> StepTime:
    """What the model says of such a step, by part; what ranks compute is multiplied where they share a device."""
    shape = StepShape(decode_tokens=round(step.tokens), context_len=step.context_len)
    time = StepCosts(operations).step_time([shape], tracks=step.tracks)
    return StepTime(*[step.sharing * part for part in time])


def prediction_figures(operations: Operations, step: MeasuredStep) -> dict[str, Any]:
    """Predicted beside measured, with the signed error."""
    time = predict(operations, step)
    predicted_ms = time.total_us / 1000
    return {
        "predicted_step_ms": predicted_ms,
        "measured_step_ms": step.step_ms,
        "signed_error": (predicted_ms - step.step_ms) / step.step_ms,
        **_by_cpu(predicted_ms / step.sharing, step.step_cpu_ms),
        "predicted_parts_ms": {
            "attention": time.attention_us / 1000,
            "experts": time.experts_us / 1000,
            "exchange": time.exchange_us / 1000,
            "head": time.head_us / 1000,
            "host": time.host_us / 1000,
        },
        "sharing": step.sharing,
    }


def _by_cpu(predicted_ms: float, measured_ms: float | None) -> dict[str, float | None]:
    """The same by the processor time of one rank."""
    error = None if measured_ms is None else (predicted_ms - measured_ms) / measured_ms
    return {"predicted_cpu_ms": predicted_ms, "measured_cpu_ms": measured_ms, "signed_error_cpu": error}


def use_figures(shape: CostShape, hardware: Hardware, step: MeasuredStep, *, width: int) -> dict[str, Any]:
    """MBU and MFU of one rank's device; `width` bytes a number (one for a model whose matrices are fp8)."""
    per_s = 1000.0 / step.step_ms * step.sharing
    num_bytes, flops = step_bytes(shape, step, width=width), step_flops(shape, step)
    peak = hardware.fp8_flops if shape.fp8 and hardware.fp8_flops else hardware.bf16_flops
    return {
        "activated_bytes_per_step": num_bytes,
        "flops_per_step": flops,
        "mbu": num_bytes * per_s / hardware.memory_bytes_per_s,
        "mfu": flops * per_s / peak,
    }


def step_bytes(shape: CostShape, step: MeasuredStep, *, width: int) -> float:
    """What a rank must read: matrices `width` bytes a number, head and latents two at least."""
    layers = shape.moe_layers + shape.dense_layers
    wide = max(width, 2)
    weights = layers * (width * shape.projections + wide * shape.absorbed)
    weights += width * shape.dense_layers * 3 * shape.hidden * shape.dense_width
    if shape.experts:
        touched = 1.0 - (1.0 - shape.top_k / shape.experts) ** (step.ranks * step.mean_tokens)
        held = shape.experts / step.ranks * touched + shape.shared_experts
        weights += shape.moe_layers * (width * held * shape.expert + wide * shape.hidden * shape.experts)
    latents = layers * wide * (shape.latent + shape.rope) * step.mean_tokens * step.context_len
    return weights + wide * shape.vocab * shape.hidden + latents


def step_flops(shape: CostShape, step: MeasuredStep) -> float:
    """What a rank's own tokens need, wherever their experts run: two operations a parameter, and attention's core."""
    layers = shape.moe_layers + shape.dense_layers
    used = layers * (shape.projections + shape.absorbed) + shape.vocab * shape.hidden
    used += shape.dense_layers * 3 * shape.hidden * shape.dense_width
    used += shape.moe_layers * ((shape.top_k + shape.shared_experts) * shape.expert + shape.hidden * shape.experts)
    core = layers * 2 * shape.heads * (2 * shape.latent + shape.rope) * step.context_len
    return step.mean_tokens * (2.0 * used + core)
