"""The simple truth of a MoE layer: no exchange, no slots, one token or one expert at a time.

Knows nothing of ranks. Shares with the real code only the router's logits (so that equal scores are equal in both) and
the weights' containers.

Legend: T tokens here, D model, E experts, K top-k.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ep import wide

from .config import MoeConfig
from .experts import ExpertBank, Fp8Scales, Mlp
from .layer import MoeWeights
from .quant import dequantize_rows, quantize_blocks, quantize_rows
from .routing import Routing


def route_by_loop(x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor | None, config: MoeConfig) -> Routing:
    """`route` as a loop over tokens with Python lists."""
    dtype = wide(x_TD.dtype)
    logits_TE = functional.linear(x_TD.to(dtype), gate_ED.to(dtype))
    scores_TE = logits_TE.sigmoid() if config.scoring == "sigmoid" else logits_TE.softmax(dim=1)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(dtype)
    experts = [_pick(row, config) for row in biased_TE.tolist()]
    weights = [
        _weigh([row[e] for e in picked], config) for row, picked in zip(scores_TE.tolist(), experts, strict=True)
    ]
    shape = (x_TD.shape[0], config.top_k)
    return Routing(
        torch.tensor(experts, dtype=torch.int64).reshape(shape), torch.tensor(weights, dtype=dtype).reshape(shape)
    )


def dense_moe(x_TD: Tensor, weights: MoeWeights, config: MoeConfig) -> Tensor:
    """[T, D] in x's dtype: a loop over experts, summed in the wide dtype. `weights.bank` holds expert e in slot e."""
    routing = route_by_loop(x_TD, weights.gate_ED, weights.bias_E, config)
    out_TD = torch.zeros_like(x_TD, dtype=wide(x_TD.dtype))
    for expert in range(config.num_experts):
        tokens, choices = torch.where(routing.experts_TK == expert)
        y = run_expert(x_TD[tokens], weights.bank, expert)
        out_TD.index_add_(0, tokens, y.to(out_TD.dtype) * routing.weights_TK[tokens, choices].unsqueeze(1))
    out_TD = out_TD.to(x_TD.dtype)
    return out_TD if weights.shared is None else out_TD + weights.shared(x_TD)


def run_expert(x_TD: Tensor, bank: ExpertBank, slot: int) -> Tensor:
    """[T, D]: one slot's expert on every row, gate and up apart."""
    gate_up_2FD, down_DF = bank.slot_weights(slot, x_TD.dtype)
    gate_FD, up_FD = gate_up_2FD.chunk(2)
    return (functional.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)) @ down_DF.T


def run_fp8_expert(x_TD: Tensor, bank: ExpertBank, slot: int) -> Tensor:
    """float64 [T, D]: one slot of an fp8 bank on every row, rounded to fp8 where kernels round, and nowhere else."""
    gate_up_2FD, down_DF = bank.slot_weights(slot, torch.float64)
    gate_TF, up_TF = functional.linear(_through_fp8(x_TD), gate_up_2FD).chunk(2, dim=1)
    return functional.linear(_through_fp8(functional.silu(gate_TF) * up_TF), down_DF)


def _through_fp8(x_TD: Tensor) -> Tensor:
    return dequantize_rows(*quantize_rows(x_TD), torch.float64)


def random_weights(config: MoeConfig, *, seed: int, dtype: torch.dtype) -> MoeWeights:
    """A whole layer, expert e in slot e: the same numbers for the same seed, whoever asks.

    Sized so that outputs are near 1 and the correction bias moves choices and makes some scores negative.
    """
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=noise, dtype=torch.float64) * std).to(dtype)

    hidden, width = config.hidden_size, config.intermediate_size
    shared_width = config.shared_intermediate_size
    return MoeWeights(
        gate_ED=draw(config.num_experts, hidden, std=hidden**-0.5),
        bias_E=draw(config.num_experts, std=0.3).to(wide(dtype)) if config.has_bias else None,
        shared=Mlp(
            gate_up_2FD=draw(2 * shared_width, hidden, std=hidden**-0.5),
            down_DF=draw(hidden, shared_width, std=shared_width**-0.5),
        )
        if shared_width
        else None,
        bank=ExpertBank(
            gate_up_L2FD=draw(config.num_experts, 2 * width, hidden, std=hidden**-0.5),
            down_LDF=draw(config.num_experts, hidden, width, std=width**-0.5),
        ),
    )


def quantize_bank(bank: ExpertBank) -> ExpertBank:
    """The same bank in fp8 with block scales, gate and up quantised apart."""
    gate_up, gate_up_scale = quantize_blocks(bank.gate_up_L2FD.unflatten(1, (2, -1)))
    down, down_scale = quantize_blocks(bank.down_LDF)
    scales = Fp8Scales(gate_up_L2fd=gate_up_scale, down_Ldf=down_scale)
    return ExpertBank(gate_up_L2FD=gate_up.flatten(1, 2), down_LDF=down, scales=scales)


def take_slots(bank: ExpertBank, experts: Sequence[int]) -> ExpertBank:
    """One rank's bank out of a whole one: slot i gets expert `experts[i]`; an empty slot (-1) is all NaN."""

    def take(values: Tensor) -> Tensor:
        empty = torch.full(values.shape[1:], torch.nan).to(values.dtype)
        return torch.stack([values[expert] if expert >= 0 else empty for expert in experts])

    scales = bank.scales and Fp8Scales(gate_up_L2fd=take(bank.scales.gate_up_L2fd), down_Ldf=take(bank.scales.down_Ldf))
    return ExpertBank(gate_up_L2FD=take(bank.gate_up_L2FD), down_LDF=take(bank.down_LDF), scales=scales)


def _pick(biased: list[float], config: MoeConfig) -> list[int]:
    """Expert ids of one token, best first; sorted() is stable, so equal scores stay in id order."""
    allowed = range(len(biased))
    if config.is_group_limited:
        size = len(biased) // config.num_groups
        groups = [biased[start : start + size] for start in range(0, len(biased), size)]
        best = 2 if config.method == "noaux_tc" else 1
        scores = [sum(sorted(group, reverse=True)[:best]) for group in groups]
        kept = sorted(range(config.num_groups), key=lambda g: -scores[g])[: config.topk_groups]
        allowed = [expert for expert in allowed if expert // size in kept]
    return sorted(allowed, key=lambda expert: -biased[expert])[: config.top_k]


def _weigh(scores: list[float], config: MoeConfig) -> list[float]:
    total = math.fsum(scores) + 1e-20 if config.norm_topk_prob else 1.0
    return [score / total * config.routed_scaling for score in scores]
