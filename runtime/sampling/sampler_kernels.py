"""Choosing tokens on the device, one Triton program a row: the order and number formats of `sampler`, without a sort.

Where the ranks of a row end (top_k, top_p) is found by bisecting the logits themselves: of a border it is enough to
know how many tokens, or how much weight, lie above. Sums are of whole numbers and do not depend on how they are cut.
One thing may differ from torch: the last bit of exp(), and with it a weight by 2^-52 of itself. Knows columns of
numbers (`sampler_table`); does not know requests.

Letters: B rows, V vocabulary, n rows of one launch, S request slots, H history, K columns.
"""

# Triton annotates what a kernel is compiled for as constexpr, where a launch gives plain values.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampler_table import Columns, PenaltyColumns

__all__ = ["CHOOSE_OPTIONS", "PENALISE_OPTIONS", "choose", "choose_constants", "count_constants", "penalise"]

BLOCK = 2048
CHOOSE_OPTIONS = {"num_warps": 8}
PENALISE_OPTIONS = {"enable_fp_fusion": False}
"""Product and difference are rounded one after the other, as they are everywhere else."""


@triton.jit
def _uniform(seed, position, choice):
    """`philox.uniform` with draw 0. Example: the first two output words 0 and 0 give 2^-53."""
    zero = (position * 0).to(tl.uint32)
    word0, word1, _, _ = tl.philox(seed, position.to(tl.uint32), choice.to(tl.uint32), zero, zero)
    bits = (word0.to(tl.int64) << 20) | (word1.to(tl.int64) >> 12)
    return (2 * bits + 1).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _keys(x):
    """Whole numbers in the order of the floats, both zeros one. Example: the keys of -2.0, -1.0, 0.0, 1.0 ascend."""
    x = tl.where(x == 0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _weights(x, largest, temperature, min_p, BITS: tl.constexpr):
    """Fixed-point weights of tokens; the largest logit has 2^BITS, what lies below min_p of it 0."""
    w = tl.exp((x.to(tl.float64) - largest) / temperature)
    q = (w * (1 << BITS)).to(tl.int64)
    return tl.where(w >= min_p, q, 0)


@triton.jit
def _num_above(x_V, key, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens lie above `key`."""
    number = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_V + ids, mask=ids < V, other=float("-inf"))
        number += ((_keys(x) > key) & (ids < V)).to(tl.int64)
    return tl.sum(number, 0)


@triton.jit
def _sum_above(x_V, key, largest, temperature, min_p, V: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of all tokens above `key`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_V + ids, mask=ids < V, other=float("-inf"))
        total += tl.where(_keys(x) > key, _weights(x, largest, temperature, min_p, BITS), 0)
    return tl.sum(total, 0)


@triton.jit
def _at(x_V, key, largest, temperature, min_p, V: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """(how many tokens lie at `key`, the weight of each of them)."""
    number = tl.zeros((BLOCK,), tl.int64)
    weight = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_V + ids, mask=ids < V, other=float("-inf"))
        at = (_keys(x) == key) & (ids < V)
        number += at.to(tl.int64)
        weight = tl.maximum(weight, tl.where(at, _weights(x, largest, temperature, min_p, BITS), 0))
    return tl.sum(number, 0), tl.max(weight, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    logits_BV,
    x_nV,
    rows_n,
    ints_KB,
    floats_KB,
    token_B,
    ok_B,
    num_rows,
    V: tl.constexpr,
    BITS: tl.constexpr,
    EDITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row; an edited row has its logits in x, any other reads what it was given.

    Example, greedy: logits (0.5, 2, 2) choose token 1. With top_k 1 at any temperature tokens 1 and 2 tie, and the
    lower id stays: token 1 again.
    """
    n = tl.program_id(0)
    b = tl.load(rows_n + n).to(tl.int64)
    x_V = x_nV + n.to(tl.int64) * V if EDITED else logits_BV + b * V
    raw_V = logits_BV + b * V

    best = tl.full((BLOCK,), float("-inf"), x_V.dtype.element_ty)
    best_id = tl.zeros((BLOCK,), tl.int32)
    raw_best = tl.full((BLOCK,), float("-inf"), raw_V.dtype.element_ty)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_V + ids, mask=ids < V, other=float("-inf"))
        best_id = tl.where(x > best, ids, best_id)
        best = tl.maximum(best, x)
        raw = tl.load(raw_V + ids, mask=ids < V, other=float("-inf"))
        raw_best = tl.maximum(raw_best, raw)
        broken |= ((raw != raw) | (x != x)).to(tl.int32)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_id, V), 0)
    raw_top = tl.max(raw_best, 0)
    infinite = float("inf")
    ok = (tl.max(broken, 0) == 0) & (tl.abs(top) < infinite) & (tl.abs(raw_top) < infinite)

    temperature = tl.load(floats_KB + b)
    if ok & (temperature > 0):
        top_p = tl.load(floats_KB + num_rows + b)
        min_p = tl.load(floats_KB + 2 * num_rows + b)
        top_k = tl.load(ints_KB + b)
        largest = top.to(tl.float64)
        highest = tl.max(_keys(best), 0)
        lowest = tl.min(_keys(tl.full((BLOCK,), float("-inf"), x_V.dtype.element_ty)), 0) - 1

        # Ranks below top_k: above `border`, and the first `num_kept` of those at it.
        low, high = lowest, highest
        if top_k < V:
            while low + 1 < high:
                middle = (low & high) + ((low ^ high) >> 1)
                if _num_above(x_V, middle, V, BLOCK) < top_k:
                    high = middle
                else:
                    low = middle
        border = tl.where(top_k < V, high, lowest)
        total = _sum_above(x_V, border, largest, temperature, min_p, V, BITS, BLOCK)
        num_kept = tl.zeros_like(total)
        if top_k < V:
            num_at, weight_at = _at(x_V, border, largest, temperature, min_p, V, BITS, BLOCK)
            num_kept = tl.minimum(top_k - _num_above(x_V, border, V, BLOCK), num_at)
            total += num_kept * weight_at

        if top_p < 1.0:
            limit = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)
            low, high = border - 1, highest
            while low + 1 < high:
                middle = (low & high) + ((low ^ high) >> 1)
                if _sum_above(x_V, middle, largest, temperature, min_p, V, BITS, BLOCK) < limit:
                    high = middle
                else:
                    low = middle
            sum_above = _sum_above(x_V, high, largest, temperature, min_p, V, BITS, BLOCK)
            num_at, weight_at = _at(x_V, high, largest, temperature, min_p, V, BITS, BLOCK)
            num_fit = (limit - sum_above + weight_at - 1) // tl.maximum(weight_at, 1)
            num_kept = tl.minimum(num_fit, tl.where(high == border, num_kept, num_at))
            border = high
            total = sum_above + num_kept * weight_at

        seed = tl.load(ints_KB + num_rows + b)
        position = tl.load(ints_KB + 2 * num_rows + b)
        choice = tl.load(ints_KB + 3 * num_rows + b)
        random = _uniform(seed, position, choice)
        target = tl.minimum((random * total.to(tl.float64)).to(tl.int64), total - 1)
        reached = tl.zeros_like(total)
        num_ties = tl.zeros_like(total)
        token = tl.zeros_like(token) + V
        start = tl.zeros_like(token)
        while (start < V) & (token == V):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(x_V + ids, mask=ids < V, other=float("-inf"))
            at = ((_keys(x) == border) & (ids < V)).to(tl.int64)
            tie = num_ties + tl.cumsum(at, 0) - at
            kept = (_keys(x) > border) | ((at > 0) & (tie < num_kept))
            q = tl.where(kept & (ids < V), _weights(x, largest, temperature, min_p, BITS), 0)
            running = reached + tl.cumsum(q, 0)
            token = tl.min(tl.where(running > target, ids, V), 0)
            reached += tl.sum(q, 0)
            num_ties += tl.sum(at, 0)
            start += BLOCK
    tl.store(token_B + b, tl.where(ok, token, 0).to(tl.int64))
    tl.store(ok_B + b, ok)


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(tokens_SH, columns_KN, counts_nV, num_rows, H, V: tl.constexpr, BLOCK: tl.constexpr):
    """Counts of tokens in a row's history: bit 0 says that the prompt holds it, the rest how often the output does.

    Example: prompt [5, 5], output [7, 5, 7] give 3 at token 5 and 4 at token 7.
    """
    n = tl.program_id(0)
    slot = tl.load(columns_KN + n)
    position = tl.load(columns_KN + num_rows + n)
    prompt_len = tl.load(columns_KN + 2 * num_rows + n)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(tokens_SH + slot * H + places, mask=places < position, other=0).to(tl.int64)
    counts = counts_nV + n.to(tl.int64) * V + ids
    tl.atomic_or(counts, 1, mask=places < tl.minimum(prompt_len, position))
    tl.atomic_add(counts, 2, mask=(places >= prompt_len) & (places < position))


@triton.jit(do_not_specialize=["num_rows"])
def _penalise_kernel(x_nV, counts_nV, penalties_KN, num_rows, V: tl.constexpr, BLOCK: tl.constexpr):
    """x by its token's counts: repetition, then frequency, then presence, each rounded by itself.

    Example, repetition 2, frequency 0.5, presence 0.25: a logit of 3 whose token the output holds twice becomes
    3 / 2 - 0.5 * 2 - 0.25 = 0.25; one of -3 that only the prompt holds becomes -6.
    """
    n = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = n.to(tl.int64) * V
    count = tl.load(counts_nV + row + ids, mask=ids < V, other=0)
    repetition = tl.load(penalties_KN + n)
    frequency = tl.load(penalties_KN + num_rows + n)
    presence = tl.load(penalties_KN + 2 * num_rows + n)
    x = tl.load(x_nV + row + ids, mask=ids < V, other=0.0)
    x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    num_output = count >> 1
    x = x - frequency * num_output.to(tl.float64)
    x = x - tl.where(num_output > 0, presence, 0.0)
    tl.store(x_nV + row + ids, x, mask=(ids < V) & (count > 0))


def penalise(x_nV: Tensor, tokens_SH: Tensor, penalties: PenaltyColumns, *, counts_nV: Tensor) -> None:
    """Penalties on float64 logits, in place. `counts_nV` is int32 scratch; `tokens_SH` the token table."""
    num_rows, vocab_size = x_nV.shape
    assert x_nV.is_contiguous(), f"x has strides {x_nV.stride()}"
    assert tokens_SH.is_contiguous(), f"the table has strides {tokens_SH.stride()}"
    counts_nV.zero_()
    constants = count_constants(vocab_size)
    if penalties.history_len:
        _count_kernel[(num_rows, triton.cdiv(penalties.history_len, constants["BLOCK"]))](
            tokens_SH, penalties.ints_KN, counts_nV, num_rows, tokens_SH.shape[1], **constants
        )
    _penalise_kernel[(num_rows, triton.cdiv(vocab_size, constants["BLOCK"]))](
        x_nV, counts_nV, penalties.floats_KN, num_rows, **constants, **PENALISE_OPTIONS
    )


def count_constants(vocab_size: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {"V": vocab_size, "BLOCK": 1024}


def choose(
    logits_BV: Tensor, x_nV: Tensor | None, rows_n: Tensor, columns: Columns, *, token_B: Tensor, ok_B: Tensor
) -> None:
    """A token for each of `rows_n` (int64 places among the logits) into `token_B` and `ok_B`.

    x_nV   edited logits of these rows, float64; None: they are as given
    """
    if not rows_n.shape[0]:
        return
    assert logits_BV.is_contiguous(), f"logits have strides {logits_BV.stride()}"
    assert x_nV is not None or logits_BV.dtype is torch.float32, f"{logits_BV.dtype} logits count as edited"
    _choose_kernel[(rows_n.shape[0],)](
        logits_BV,
        x_nV,
        rows_n,
        columns.ints_KB,
        columns.floats_KB,
        token_B,
        ok_B,
        logits_BV.shape[0],
        **choose_constants(logits_BV.shape[1], edited=x_nV is not None),
        **CHOOSE_OPTIONS,
    )


def choose_constants(vocab_size: int, *, edited: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "V": vocab_size,
        "BITS": 62 - (vocab_size - 1).bit_length(),
        "EDITED": edited,
        "BLOCK": min(triton.next_power_of_2(max(vocab_size, 16)), BLOCK),
    }
