"""Kernels of a MoE layer for a processor: the router's decisions for a few tokens, and pairs sorted by slot.

Which experts a token visits is decided as `routing.route` and `placement.choose_slots` do, step by step; only the
router's matmul adds up in another order. Needs numba.

Legend: T tokens here, D model, E experts, K top-k, Q groups, N rows, L local slots, M pairs.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ep.cpu.calls import kernel, words_of
from ep.cpu.language import add, bits_double, claim, exp, floats, halves, longs, widen

from .config import MoeConfig
from .placement import PlacementTable
from .routing import NORM_GUARD

__all__ = ["Grouped", "choose_experts", "group_pairs"]

_TOKENS = 4
"""That share a look at the router's weights."""


def choose_experts(
    x_TD: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor | None,
    config: MoeConfig,
    table: PlacementTable,
    *,
    rank: int,
    positions_T: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    counts_E: Tensor,
) -> None:
    """Fill the last four, as `ops.Routed` has them; counts come as zeros. x is bf16, gate and bias float32."""
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert gate_ED.is_contiguous()
    num_tokens = x_TD.shape[0]
    if not num_tokens:
        return
    limited = config.is_group_limited
    _choose_kernel(
        -(-num_tokens // _TOKENS),
        num_tokens,
        x_TD.data_ptr(),
        2 * x_TD.stride(0),
        x_TD.shape[1],
        gate_ED.data_ptr(),
        config.num_experts,
        0 if bias_E is None else bias_E.data_ptr(),
        config.scoring == "sigmoid",
        config.num_groups if limited else 1,
        config.topk_groups if limited else 1,
        config.method == "noaux_tc",
        config.top_k,
        config.norm_topk_prob,
        *words_of(config.routed_scaling),
        table.slots_EX.data_ptr(),
        table.bounds_EX.data_ptr(),
        table.max_copies,
        rank,
        positions_T.data_ptr(),
        slots_TK.data_ptr(),
        weights_TK.data_ptr(),
        experts_TK.data_ptr(),
        counts_E.data_ptr(),
    )


class Grouped(NamedTuple):
    """(row, slot) pairs sorted by slot, in (row, top-k) order within one; all int64."""

    starts_L: Tensor
    """[L + 1] where each slot's places begin; the last is the number of pairs."""
    rows_M: Tensor
    """[N * K] the row of each place; past the last pair anything."""
    places_NK: Tensor
    """The place of each pair, -1 for none."""


def group_pairs(slots_NK: Tensor, num_slots: int) -> Grouped:
    """Where the pairs of some rows are; slot -1 is none. slots_NK may lie between other things."""
    num_rows, top_k = slots_NK.shape
    found = Grouped(
        torch.empty(num_slots + 1, dtype=torch.int64),
        torch.empty(num_rows * top_k, dtype=torch.int64),
        torch.empty(num_rows, top_k, dtype=torch.int64),
    )
    sides = (*slots_NK.stride(), num_rows, top_k, num_slots)
    _group_kernel(1, slots_NK.data_ptr(), *sides, *[tensor.data_ptr() for tensor in found])
    return found


_NONE, _ZERO, _ONE = np.float32(-np.inf), np.float32(0.0), np.float32(1.0)
_GUARD = np.float32(NORM_GUARD)
_WORD, _GOLDEN = 0xFFFFFFFF, 0x9E3779B9


@njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _logits(x, x_row, some, width, gate, num_experts, scores):
    """scores [some, E]: the router's matmul for up to four rows at the address x."""
    a, b = halves(x), halves(x + min(1, some - 1) * x_row)
    c, d = halves(x + min(2, some - 1) * x_row), halves(x + min(3, some - 1) * x_row)
    for expert in range(num_experts):
        row = floats(gate + 4 * expert * width)
        sum_a, sum_b, sum_c, sum_d = _ZERO, _ZERO, _ZERO, _ZERO
        for k in range(width):
            weight = row[k]
            sum_a += widen(a[k]) * weight
            sum_b += widen(b[k]) * weight
            sum_c += widen(c[k]) * weight
            sum_d += widen(d[k]) * weight
        scores[0, expert] = sum_a
        scores[1, expert] = sum_b
        scores[2, expert] = sum_c
        scores[3, expert] = sum_d


@njit(error_model="numpy")
def _to_scores(logits_E, is_sigmoid):
    """In place: their sigmoid or softmax."""
    if is_sigmoid:
        for e in range(len(logits_E)):
            logits_E[e] = _ONE / (_ONE + exp(-logits_E[e]))
        return
    most, total = logits_E.max(), _ZERO
    for e in range(len(logits_E)):
        logits_E[e] = exp(logits_E[e] - most)
        total += logits_E[e]
    for e in range(len(logits_E)):
        logits_E[e] /= total


@njit(error_model="numpy")
def _best(values):
    """The first of the largest."""
    best = 0
    for each in range(1, len(values)):
        if values[each] > values[best]:
            best = each
    return best


@njit(error_model="numpy")
def _shut_out_groups(choice_E, num_groups, kept, by_two):
    """In place: experts of every group but the `kept` best at -inf; a group counts by its best, or its best two."""
    size = len(choice_E) // num_groups
    group_Q = np.empty(num_groups, np.float32)
    for q in range(num_groups):
        first, second = _NONE, _NONE
        for e in range(q * size, (q + 1) * size):
            if choice_E[e] > first:
                first, second = choice_E[e], first
            elif choice_E[e] > second:
                second = choice_E[e]
        group_Q[q] = first + second if by_two else first
    shut_Q = np.ones(num_groups, np.bool_)
    for _ in range(kept):
        q = _best(group_Q)
        group_Q[q] = _NONE
        shut_Q[q] = False
    for e in range(len(choice_E)):
        if shut_Q[e // size]:
            choice_E[e] = _NONE


@njit(error_model="numpy")
def _scramble(word):
    word = (word ^ (word >> 16)) * 0x21F0AAAD & _WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & _WORD
    return word ^ (word >> 15)


@njit(error_model="numpy")
def _slot(expert, row, position, rank, slots_EX, bounds_EX, most):
    """`placement.choose_slots` of one pair."""
    if most == 1:
        return longs(slots_EX)[expert]
    mixed = _scramble(_scramble((row + (rank << 20)) & _WORD) ^ expert)
    word = (mixed + position * _GOLDEN) & _WORD
    copy = 0
    for x in range(most):
        copy += word >= longs(bounds_EX)[expert * most + x]
    return longs(slots_EX)[expert * most + copy]


@kernel()
def _choose_kernel(args):
    num_tokens, x, x_row, width, gate, num_experts, bias = args[2], args[3], args[4], args[5], args[6], args[7], args[8]
    is_sigmoid, num_groups, kept, by_two = args[9], args[10], args[11], args[12]
    top_k, normalise, scaling = args[13], args[14], np.float32(bits_double(args[15]))
    slots_EX, bounds_EX, most, rank, positions = args[16], args[17], args[18], args[19], args[20]
    slots, weights, experts, counts = longs(args[21]), floats(args[22]), longs(args[23]), args[24]
    scores = np.empty((_TOKENS, num_experts), np.float32)
    choice_E, picked_K = np.empty(num_experts, np.float32), np.empty(top_k, np.float32)
    while True:
        first = claim(args) * _TOKENS
        if first >= num_tokens:
            return
        some = min(_TOKENS, num_tokens - first)
        _logits(x + first * x_row, x_row, some, width, gate, num_experts, scores)
        for m in range(some):
            row = first + m
            position = longs(positions)[row]
            scores_E = scores[m]
            _to_scores(scores_E, is_sigmoid)
            for e in range(num_experts):
                choice_E[e] = scores_E[e] + floats(bias)[e] if bias else scores_E[e]
            if num_groups > 1:
                _shut_out_groups(choice_E, num_groups, kept, by_two)
            total = _ZERO
            for k in range(top_k):
                expert = _best(choice_E)
                choice_E[expert] = _NONE
                picked_K[k] = scores_E[expert]
                total += picked_K[k]
                at = row * top_k + k
                if position < 0:
                    experts[at], slots[at] = -1, -1
                else:
                    experts[at] = expert
                    slots[at] = _slot(expert, row, position, rank, slots_EX, bounds_EX, most)
                    add(counts + 8 * expert, 1)
            for k in range(top_k):
                share = picked_K[k] / (total + _GUARD) if normalise else picked_K[k]
                weights[row * top_k + k] = share * scaling


@kernel()
def _group_kernel(args):
    slots, row_step, k_step, num_rows, top_k, num_slots = longs(args[2]), args[3], args[4], args[5], args[6], args[7]
    starts, rows, places = longs(args[8]), longs(args[9]), longs(args[10])
    for s in range(num_slots + 1):
        starts[s] = 0
    for n in range(num_rows):
        for k in range(top_k):
            slot = slots[n * row_step + k * k_step]
            if slot >= 0:
                starts[slot + 1] += 1
    for s in range(num_slots):
        starts[s + 1] += starts[s]
    next_L = np.empty(num_slots, np.int64)
    for s in range(num_slots):
        next_L[s] = starts[s]
    for n in range(num_rows):
        for k in range(top_k):
            slot = slots[n * row_step + k * k_step]
            place = -1
            if slot >= 0:
                place = next_L[slot]
                next_L[slot] += 1
                rows[place] = n
            places[n * top_k + k] = place
