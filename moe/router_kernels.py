"""The router on a GPU: `routing.route`, the load count and `placement.choose_slots` in two kernels.

    logits   x @ gate.T in float32, in parts along D whose number does not depend on the batch
    choose   adds the parts, scores, shuts out groups, picks, weighs, counts, and picks a copy of each expert

A row's result depends on nothing but the row. Scores are float32, rounded as float32 is, not bit for bit as torch does
it; what is picked from equal scores is the same: equal scores go to the lowest id at every step.

Numbers of rows, which change from step to step, are not specialised: nothing is compiled while it runs.

Legend: T tokens here, D model, E experts, K top-k, S parts, X copies of one expert, Q groups of G experts; in kernels
T, E, K, Q and G are padded to powers of two.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (Triton's own language is typed as plain Python.)

import triton
import triton.language as tl
from torch import Tensor

from .config import MoeConfig
from .placement import _GOLDEN, PlacementTable
from .routing import NORM_GUARD

GUARD = tl.constexpr(NORM_GUARD)
GOLDEN = tl.constexpr(_GOLDEN)
PARTS = 8
"""Parts along D: enough programs for a small batch, always the same sum."""


@triton.jit(do_not_specialize=["num_tokens"])
def logits_kernel(
    x_ptr, gate_ptr, parts_ptr, num_tokens, x_stride,
    D: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_T tokens, BLOCK_E experts and one part of D. Operands are swapped, as experts' are.

    D 4, 2 parts, x [1, 2, 3, 4], a gate row [1, 1, 1, 1]: parts 3 and 7.
    """
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    PART: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS * BLOCK_D
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    x_ptrs = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * x_stride
    gate_ptrs = gate_ptr + tl.minimum(expert, E - 1)[:, None] * D
    logits = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for start in range(0, PART, BLOCK_D):
        column = part * PART + start + tl.arange(0, BLOCK_D)
        inside = (column < D)[None, :]
        x = tl.load(x_ptrs + column[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptrs + column[None, :], mask=inside, other=0.0).to(tl.float32)
        logits += tl.dot(gate, tl.trans(x), input_precision="tf32x3", out_dtype=tl.float32)
    target = parts_ptr + (part * num_tokens + token[None, :]).to(tl.int64) * E + expert[:, None]
    tl.store(target, logits, mask=(token < num_tokens)[None, :] & (expert < E)[:, None])


@triton.jit
def scramble(word):
    """uint32 in, uint32 out: `placement._scramble`, whose products wrap by themselves here."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def _best(scores_TE, free_TE, ids_TE, NONE: tl.constexpr):
    """[T] the lowest of the free ids with the largest score. A NaN counts as -inf, so there is always one."""
    scores_TE = tl.where(free_TE & (scores_TE == scores_TE), scores_TE, float("-inf"))
    best_T = tl.max(scores_TE, axis=1)
    return tl.min(tl.where(free_TE & (scores_TE == best_T[:, None]), ids_TE, NONE), axis=1)


@triton.jit
def _open_groups(choice_TQG, ADD_TOP_TWO: tl.constexpr, Q: tl.constexpr, KEPT: tl.constexpr):
    """[T, Q] whether a group is one of the KEPT best; its score is its best one or the sum of its two best.

    Scores [[[.9, 0], [.5, .6]]], KEPT 1 -> [[False, True]] when two are added, else [[True, False]].
    """
    score_TQ = tl.max(choice_TQG, axis=2)
    if ADD_TOP_TWO:
        column = tl.arange(0, choice_TQG.shape[2])[None, None, :]
        is_best = choice_TQG == score_TQ[:, :, None]
        first_TQ = tl.min(tl.where(is_best, column, choice_TQG.shape[2]), axis=2)
        rest_TQG = tl.where(column == first_TQ[:, :, None], float("-inf"), choice_TQG)
        score_TQ += tl.max(rest_TQG, axis=2)
    group = tl.arange(0, choice_TQG.shape[1])[None, :]
    open_TQ = (score_TQ != score_TQ) & (group < 0)
    for _ in tl.static_range(KEPT):
        best_T = _best(score_TQ, (group < Q) & (open_TQ == 0), group, Q)
        open_TQ = open_TQ | (group == best_T[:, None])
    return open_TQ


@triton.jit(do_not_specialize=["num_tokens", "rank", "scaling"])
def choose_kernel(
    parts_ptr, bias_ptr, positions_ptr, table_ptr, bounds_ptr,
    experts_ptr, slots_ptr, weights_ptr, counts_ptr, num_tokens, rank, scaling,
    E: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    Q: tl.constexpr, KEPT: tl.constexpr, NORMALIZE: tl.constexpr, COPIES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_T tokens. Each group of scores is padded to BLOCK_G. KEPT 0: no group is shut out.

    E 4, K 2, 2 groups, 1 kept, sigmoid, bias 0, logits [3, 0, 1, 2]: groups score 1.45 and 1.61, so experts 3 and 2 are
    picked, with weights 0.88 and 0.73, or 0.55 and 0.45 normalised.
    """
    G: tl.constexpr = E // Q
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    number = tl.arange(0, BLOCK_Q * BLOCK_G)
    id_E = number // BLOCK_G * G + number % BLOCK_G
    is_expert = (number // BLOCK_G < Q) & (number % BLOCK_G < G)
    ids_TE = tl.broadcast_to(id_E[None, :], (BLOCK_T, BLOCK_Q * BLOCK_G))
    free_TE = tl.broadcast_to(is_expert[None, :], (BLOCK_T, BLOCK_Q * BLOCK_G))
    inside_TE = is_token[:, None] & is_expert[None, :]

    logits_TE = tl.full([BLOCK_T, BLOCK_Q * BLOCK_G], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        row = (part * num_tokens + token).to(tl.int64)
        logits_TE += tl.load(parts_ptr + row[:, None] * E + id_E[None, :], mask=inside_TE, other=0.0)
    if SIGMOID:
        scores_TE = 1.0 / (1.0 + tl.exp(-logits_TE))
    else:
        peak_T = tl.max(tl.where(free_TE, logits_TE, float("-inf")), axis=1)
        scores_TE = tl.where(free_TE, tl.exp(logits_TE - peak_T[:, None]), 0.0)
        scores_TE = scores_TE / tl.sum(scores_TE, axis=1)[:, None]
    choice_TE = scores_TE
    if HAS_BIAS:
        choice_TE += tl.load(bias_ptr + id_E, mask=is_expert, other=0.0)[None, :]
    if KEPT > 0:
        known_TE = tl.where(free_TE & (choice_TE == choice_TE), choice_TE, float("-inf"))
        open_TQ = _open_groups(tl.reshape(known_TE, (BLOCK_T, BLOCK_Q, BLOCK_G)), HAS_BIAS, Q, KEPT)
        open_TQG = tl.broadcast_to(open_TQ[:, :, None], (BLOCK_T, BLOCK_Q, BLOCK_G))
        free_TE = free_TE & tl.reshape(open_TQG, (BLOCK_T, BLOCK_Q * BLOCK_G))

    pick = tl.arange(0, BLOCK_K)[None, :]
    experts_TK = tl.full([BLOCK_T, BLOCK_K], -1, tl.int32)
    weights_TK = tl.full([BLOCK_T, BLOCK_K], 0.0, tl.float32)
    for k in tl.static_range(K):
        expert_T = _best(choice_TE, free_TE, ids_TE, E)
        is_picked = ids_TE == expert_T[:, None]
        weight_T = tl.sum(tl.where(is_picked & is_expert[None, :], scores_TE, 0.0), axis=1)
        free_TE = free_TE & (ids_TE != expert_T[:, None])
        experts_TK = tl.where(pick == k, expert_T[:, None], experts_TK)
        weights_TK = tl.where(pick == k, weight_T[:, None], weights_TK)
    if NORMALIZE:
        weights_TK = weights_TK / (tl.sum(weights_TK, axis=1) + GUARD)[:, None]

    position = tl.load(positions_ptr + token, mask=is_token, other=-1)
    used_TK = (position >= 0)[:, None] & (pick < K)
    experts_TK = tl.where(used_TK, experts_TK, -1)
    ones_TK = tl.full([BLOCK_T, BLOCK_K], 1, tl.int64)
    tl.atomic_add(counts_ptr + experts_TK, ones_TK, mask=used_TK)
    row_TK = tl.where(used_TK, experts_TK, E)  # the row of the tables that stands for no expert
    copy_TK = tl.full([BLOCK_T, BLOCK_K], 0, tl.int32)
    if COPIES > 1:
        seed = scramble(token.to(tl.uint32) + (rank.to(tl.uint32) << 20))
        turn = position.to(tl.uint32) * GOLDEN
        word_TK = (scramble(seed[:, None] ^ experts_TK.to(tl.uint32)) + turn[:, None]).to(tl.int64)
        copy = tl.arange(0, BLOCK_X)[None, None, :]
        bounds = tl.load(bounds_ptr + row_TK[:, :, None] * COPIES + copy, mask=copy < COPIES, other=1 << 32)
        copy_TK = tl.sum((word_TK[:, :, None] >= bounds).to(tl.int32), axis=2)
    slots_TK = tl.load(table_ptr + row_TK * COPIES + copy_TK)
    target = token.to(tl.int64)[:, None] * K + pick
    is_mine = is_token[:, None] & (pick < K)
    tl.store(experts_ptr + target, experts_TK.to(tl.int64), mask=is_mine)
    tl.store(slots_ptr + target, slots_TK, mask=is_mine)
    tl.store(weights_ptr + target, weights_TK * scaling, mask=is_mine)


def router_logits(x_TD: Tensor, gate_ED: Tensor, parts_STE: Tensor) -> None:
    """Fill float32 parts_STE [PARTS, T, E], whose sum over S is x @ gate.T."""
    num_tokens, width = x_TD.shape
    num_experts = gate_ED.shape[0]
    assert parts_STE.shape == (PARTS, num_tokens, num_experts), parts_STE.shape
    assert x_TD.stride(1) == 1, x_TD.stride()
    assert gate_ED.is_contiguous(), gate_ED.stride()
    if num_tokens == 0:
        return
    grid = triton.cdiv(num_tokens, 16), triton.cdiv(num_experts, 64), PARTS
    logits_kernel[grid](
        x_TD, gate_ED, parts_STE, num_tokens, x_TD.stride(0),
        D=width, E=num_experts, PARTS=PARTS, BLOCK_T=16, BLOCK_E=64, BLOCK_D=64, num_warps=4, num_stages=4,
    )  # fmt: skip


def choose_experts(
    parts_STE: Tensor,
    bias_E: Tensor | None,
    config: MoeConfig,
    table: PlacementTable,
    *,
    rank: int,
    positions_T: Tensor,
    experts_TK: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    counts_E: Tensor,
) -> None:
    """Fill experts, slots (int64) and weights (float32); add to counts_E (int64) what was picked.

    A token of position -1 gets expert and slot -1, is not counted, and has weights that nobody should use.
    """
    num_parts, num_tokens, num_experts = parts_STE.shape
    assert num_experts == table.num_experts == counts_E.shape[0], (num_experts, table.num_experts, counts_E.shape)
    assert experts_TK.shape == slots_TK.shape == weights_TK.shape == (num_tokens, config.top_k), slots_TK.shape
    assert config.num_experts == num_experts, (config.num_experts, num_experts)
    if num_tokens == 0:
        return
    num_groups, kept = (config.num_groups, config.topk_groups) if config.is_group_limited else (1, 0)
    # A GPU has a program to spare for every token; the interpreter takes milliseconds for one, however much it does.
    block_t = 1 if parts_STE.is_cuda else 16
    choose_kernel[(triton.cdiv(num_tokens, block_t),)](
        parts_STE, bias_E, positions_T, table.slots_EX, table.bounds_EX,
        experts_TK, slots_TK, weights_TK, counts_E, num_tokens, rank, config.routed_scaling,
        E=num_experts, K=config.top_k, PARTS=num_parts, SIGMOID=config.scoring == "sigmoid",
        HAS_BIAS=bias_E is not None, Q=num_groups, KEPT=kept, NORMALIZE=config.norm_topk_prob,
        COPIES=table.max_copies, BLOCK_T=block_t, BLOCK_Q=triton.next_power_of_2(num_groups),
        BLOCK_G=triton.next_power_of_2(num_experts // num_groups), BLOCK_K=triton.next_power_of_2(config.top_k),
        BLOCK_X=triton.next_power_of_2(table.max_copies), num_warps=4 if num_experts > 128 else 1,
    )  # fmt: skip
