"""From logits to tokens: penalties, filters, one random number a row, and the log-probabilities that were asked for.

What it does not know: requests, the model, who its batch mates are, the step. A row's result is a function of its own
logits, parameters, history, seed, choice index and position: bit for bit the same alone or among others.

**The exact order and number formats**, for whoever writes it again as a kernel. Logits are float32 or float64. Log-
probabilities are the log-softmax of these raw logits in their own type. A row that is greedy and edits nothing takes
the argmax of the raw logits. Any other row is converted to float64 (exact) and stays there:

1. bias         x += logit_bias                                     entries, each token at most once
2. repetition   x = x / r if x > 0 else x * r                       where prompt or output holds the token
3. frequency    x = x - frequency * count                           count: how often the output holds it; two
   presence     x = x - presence                                    roundings, not fused; where count > 0
4. min_tokens   x = -inf                                            at tokens that end the output
5. greedy       first id of the largest x. Otherwise, with m = max x:
6. weight       w = exp((x - m) / temperature)                      the largest is exactly 1
   fixed point  q = int64(w * 2**s), truncated, s = 62 - bit_length(V - 1)
   min_p        q = 0 where w < min_p
7. top_k        rank by (x descending, id ascending); q = 0 from rank top_k on
8. top_p        if below 1: q = 0 where the sum of q over lower ranks >= max(1, int64(top_p * float64(sum q)))
9. pick         t = min(int64(u * float64(sum q)), sum q - 1), u the row's Philox number (`philox.uniform`, draw 0);
                the token is the first id where the running sum of q, in id order, exceeds t

Why fixed point: integer sums are the same in any order (serial here, a tree in a kernel, cut anywhere), so the choice
does not depend on how a running sum was computed, and a sum over all V tokens cannot overflow. A token whose weight is
below 2**-s of the largest (s = 45 for V = 129280) is never drawn; together these are less than V * 2**-s, some 4e-9.

Ties go to the lowest id in every step: max and argmax are documented to return the first, sorts are stable, and where
torch.topk is used only its values are believed.

A row without a finite largest logit (a NaN anywhere, +inf, all -inf, or everything masked) is reported in `ok_B`, with
token 0 and NaN log-probabilities. The other rows do not notice.

Shapes: B rows, V vocabulary, n rows of one group, J single entries, S request slots, H history, K ranked tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .sampler_batch import Draw, Entries, Group, LogprobGroup, Penalties, Ranking, SamplerBatch, SampleRow

__all__ = ["SampleRow", "Sampled", "SamplerBatch", "pick", "rank_ids", "report", "sample"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One step's tokens, on the device of the logits.

    Rows that asked for no log-probabilities have NaN and -1 there; a row that asked for N reads its first N columns.
    """

    token_B: Tensor
    """int64; 0 where not ok."""
    ok_B: Tensor
    """bool: the row had logits to choose from."""
    logprob_B: Tensor
    """Of the sampled token, in the type of the logits."""
    top_ids_BK: Tensor
    """int64, most likely first, ties by id; K is the most that any row asked for; -1 beyond the vocabulary."""
    top_logprobs_BK: Tensor


def sample(logits_BV: Tensor, batch: SamplerBatch, tokens_SH: Tensor) -> Sampled:
    """Choose one token a row. The logits are not changed.

    tokens_SH is the token table: integer ids, one line a request slot; rows with penalties read their history there.
    """
    assert logits_BV.dtype in (torch.float32, torch.float64), logits_BV.dtype
    assert logits_BV.shape[0] == batch.num_rows, (logits_BV.shape, batch.num_rows)
    token_B, ok_B = _plain(logits_BV) if batch.num_plain else _nothing_chosen(logits_BV)
    for group in batch.groups:
        token_B[group.rows_n], ok_B[group.rows_n] = _choose(logits_BV, group, tokens_SH)
    token_B.masked_fill_(~ok_B, 0)
    return report(logits_BV, batch.logprob_groups, token_B=token_B, ok_B=ok_B)


def _plain(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    max_B, token_B = logits_BV.max(dim=-1)
    return token_B, max_B.isfinite()


def _nothing_chosen(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    token_B = torch.zeros(logits_BV.shape[0], dtype=torch.int64, device=logits_BV.device)
    return token_B, torch.zeros_like(token_B, dtype=torch.bool)


def _choose(logits_BV: Tensor, group: Group, tokens_SH: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one group and whether they were well chosen."""
    x_nV = logits_BV[group.rows_n].to(torch.float64)
    raw_max_n = x_nV.amax(dim=-1)
    if group.bias is not None:
        _add_bias(x_nV, group.bias)
    if group.penalties is not None:
        _penalise(x_nV, group.penalties, tokens_SH)
    if group.masked is not None:
        x_nV[group.masked.rows_J, group.masked.ids_J] = group.masked.values_J
    max_n = x_nV.amax(dim=-1)
    ok_n = raw_max_n.isfinite() & max_n.isfinite()
    x_nV = torch.where(ok_n[:, None], x_nV, 0.0)
    if group.draw is None:
        return x_nV.argmax(dim=-1), ok_n
    return _draw_token(x_nV, max_n.masked_fill(~ok_n, 0.0), group.draw), ok_n


def _add_bias(x_nV: Tensor, bias: Entries) -> None:
    x_nV[bias.rows_J, bias.ids_J] += bias.values_J


def _penalise(x_nV: Tensor, penalties: Penalties, tokens_SH: Tensor) -> None:
    """Only logits of tokens in the history change. A place past a row's history names token 0, which gets what it would
    get anyway: each new value is a function of the id alone, so ids that occur twice are written twice alike."""
    ids_nH = tokens_SH[penalties.slot_n, : penalties.history_len].to(torch.int64)
    places_H = torch.arange(penalties.history_len, device=x_nV.device)
    known_nH = places_H < penalties.position_n1
    output_nH = known_nH & (places_H >= penalties.prompt_len_n1)
    ids_nH = ids_nH.masked_fill(~known_nH, 0)
    seen_nH = _count(ids_nH, known_nH, x_nV) > 0
    num_output_nH = _count(ids_nH, output_nH, x_nV)
    x_nH = x_nV.gather(1, ids_nH)
    repeated_nH = torch.where(x_nH > 0, x_nH / penalties.repetition_n1, x_nH * penalties.repetition_n1)
    x_nH = torch.where(seen_nH, repeated_nH, x_nH)
    x_nH = x_nH - penalties.frequency_n1 * num_output_nH
    x_nH = x_nH - penalties.presence_n1 * (num_output_nH > 0)
    x_nV.scatter_(1, ids_nH, x_nH)


def _count(ids_nH: Tensor, counted_nH: Tensor, like_nV: Tensor) -> Tensor:
    """[n, H] for each place, how often its id stands at counted places of its row."""
    counts_nV = torch.zeros_like(like_nV, dtype=torch.int32)
    return counts_nV.scatter_add_(1, ids_nH, counted_nH.to(torch.int32)).gather(1, ids_nH)


def _draw_token(x_nV: Tensor, max_n: Tensor, draw: Draw) -> Tensor:
    w_nV = ((x_nV - max_n[:, None]) / draw.temperature_n1).exp_()
    q_nV = (w_nV * 2.0 ** _num_fraction_bits(x_nV)).to(torch.int64)
    if draw.min_p_n1 is not None:
        q_nV = torch.where(w_nV >= draw.min_p_n1, q_nV, 0)
    if draw.ranking is Ranking.TOP_K:
        q_nV = _keep_top_k(q_nV, x_nV, draw)
    elif draw.ranking is Ranking.TOP_P:
        q_nV = _keep_top_p(q_nV, x_nV, draw)
    return pick(q_nV, draw.random_n)


def _num_fraction_bits(x_nV: Tensor) -> int:
    """So many that V weights of at most 1 sum to at most 2**62."""
    return 62 - (x_nV.shape[1] - 1).bit_length()


def _keep_top_k(q_nV: Tensor, x_nV: Tensor, draw: Draw) -> Tensor:
    """The weights, 0 outside top_k and then outside the share top_p of what is left."""
    ranked_nK = rank_ids(x_nV, min(draw.max_top_k, x_nV.shape[1]))
    ranks_K = torch.arange(ranked_nK.shape[1], device=x_nV.device)
    q_nK = q_nV.gather(1, ranked_nK).masked_fill_(ranks_K >= draw.top_k_n1, 0)
    limit_n1 = _share(q_nK.sum(dim=1, keepdim=True), draw.top_p_n1)
    return torch.zeros_like(q_nV).scatter_(1, ranked_nK, _cut(q_nK, limit_n1))


def _keep_top_p(q_nV: Tensor, x_nV: Tensor, draw: Draw) -> Tensor:
    """The weights, 0 outside the share top_p. Sorted is only what may be inside."""
    limit_n1 = _share(q_nV.sum(dim=1, keepdim=True), draw.top_p_n1)
    ranked_nK = rank_ids(x_nV, _num_likely(q_nV, limit_n1))
    return torch.zeros_like(q_nV).scatter_(1, ranked_nK, _cut(q_nV.gather(1, ranked_nK), limit_n1))


def _share(total_n1: Tensor, top_p_n1: Tensor) -> Tensor:
    share_n1 = (top_p_n1 * total_n1.to(torch.float64)).to(torch.int64).clamp_min(1)
    return torch.where(top_p_n1 < 1.0, share_n1, total_n1)


def _cut(q_nK: Tensor, limit_n1: Tensor) -> Tensor:
    """0 from the rank on that the ranks before it have filled the limit: [5, 3, 2], limit 8 gives [5, 3, 0]."""
    return torch.where(q_nK.cumsum(dim=1) - q_nK < limit_n1, q_nK, 0)


def _num_likely(q_nV: Tensor, limit_n1: Tensor) -> int:
    """A number of ranks that fills every row's limit: of the tokens with q >= 2**low, the highest such power of two."""
    low, high = 0, _num_fraction_bits(q_nV) + 1
    while high - low > 1:
        middle = (low + high) // 2
        sum_n1 = torch.where(q_nV >= 1 << middle, q_nV, 0).sum(dim=1, keepdim=True)
        low, high = (middle, high) if bool((sum_n1 >= limit_n1).all()) else (low, middle)
    return int((q_nV >= 1 << low).count_nonzero(dim=1).max())


def pick(q_nV: Tensor, random_n: Tensor) -> Tensor:
    """The first id where the running sum passes the random share of the whole.

    q = [3, 0, 1], random 0.74: 0.74 * 4 = 2.96, target 2, running sums [3, 3, 4]: id 0. Random 0.75: target 3, id 2.
    """
    sum_nV = q_nV.cumsum(dim=1)
    total_n = sum_nV[:, -1]
    target_n = torch.minimum((random_n * total_n.to(torch.float64)).to(torch.int64), total_n - 1)
    return torch.searchsorted(sum_nV, target_n[:, None], right=True)[:, 0]


def rank_ids(x_nV: Tensor, num_ranked: int) -> Tensor:
    """[n, num_ranked] int64 ids by descending value, ties by ascending id. No NaN; num_ranked is 1 .. V."""
    if num_ranked * 8 >= x_nV.shape[1]:
        return x_nV.sort(dim=1, descending=True, stable=True).indices[:, :num_ranked]
    least_n1 = x_nV.topk(num_ranked, dim=1).values[:, -1:]
    ids_nK = (x_nV >= least_n1).nonzero()[:, 1]
    if ids_nK.shape[0] > x_nV.shape[0] * num_ranked:
        ids_nK = _without_late_ties(x_nV, least_n1, num_ranked).nonzero()[:, 1]
    ids_nK = ids_nK.view(-1, num_ranked)
    order_nK = x_nV.gather(1, ids_nK).sort(dim=1, descending=True, stable=True).indices
    return ids_nK.gather(1, order_nK)


def _without_late_ties(x_nV: Tensor, least_n1: Tensor, num_ranked: int) -> Tensor:
    """Exactly num_ranked true in every row: what is above its least value, and the lowest ids of those equal to it."""
    above_nV, equal_nV = x_nV > least_n1, x_nV == least_n1
    num_equal_n1 = num_ranked - above_nV.count_nonzero(dim=1)[:, None]
    return above_nV | (equal_nV & (equal_nV.cumsum(dim=1, dtype=torch.int32) <= num_equal_n1))


def report(logits_BV: Tensor, groups: Iterable[LogprobGroup], *, token_B: Tensor, ok_B: Tensor) -> Sampled:
    """The chosen tokens with the log-probabilities that were asked for."""
    groups = tuple(groups)
    num_most = max((group.num_top for group in groups), default=0)
    logprob_B = torch.full_like(token_B, torch.nan, dtype=logits_BV.dtype)
    top_ids_BK = token_B.new_full((len(token_B), num_most), -1)
    top_logprobs_BK = torch.full_like(top_ids_BK, torch.nan, dtype=logits_BV.dtype)
    for group in groups:
        rows_n = group.rows_n
        ok_n1, x_nV = ok_B[rows_n, None], logits_BV[rows_n]
        logprobs_nV = x_nV.log_softmax(dim=-1)
        logprob_B[rows_n] = logprobs_nV.gather(1, token_B[rows_n, None]).masked_fill_(~ok_n1, torch.nan)[:, 0]
        num_top = min(group.num_top, logits_BV.shape[1])
        if num_top:
            ids_nK = rank_ids(torch.where(ok_n1, x_nV, 0.0), num_top)
            top_ids_BK[rows_n, :num_top] = ids_nK.masked_fill(~ok_n1, -1)
            top_logprobs_BK[rows_n, :num_top] = logprobs_nV.gather(1, ids_nK).masked_fill_(~ok_n1, torch.nan)
    return Sampled(
        token_B=token_B, ok_B=ok_B, logprob_B=logprob_B, top_ids_BK=top_ids_BK, top_logprobs_BK=top_logprobs_BK
    )
