"""The sampler and its random numbers as scalar loops: textbook formulas on Python numbers, one row at a time.

Slow and plain on purpose. Probabilities are floats here where `sampler` sums fixed-point numbers, so the two agree
unless a random number, or a share of the probability, comes within rounding of a border between tokens.
"""

import math
from collections.abc import Collection, Sequence

from ..requests.sampling_params import SamplingParams


def edited_logits(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Collection[int] = (),
) -> list[float]:
    """Logits after bias, penalties and min_tokens; `prompt` and `output` are the tokens so far."""
    edited = []
    for token_id, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token_id)
        if token_id in output:
            logit -= params.presence_penalty
        ends_output = token_id in stop_ids or token_id in params.stop_token_ids
        edited.append(-math.inf if ends_output and len(output) < params.min_tokens else logit)
    return edited


def probabilities(edited: Sequence[float], params: SamplingParams) -> list[float]:
    """What each token is drawn with after temperature and filters; greedy has 1 at one token."""
    ranked = ranked_ids(edited)
    if params.is_greedy:
        return [1.0 if token_id == ranked[0] else 0.0 for token_id in range(len(edited))]
    weights = [math.exp((logit - edited[ranked[0]]) / params.temperature) for logit in edited]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if params.top_k > 0:
        for token_id in ranked[params.top_k :]:
            weights[token_id] = 0.0
    if params.top_p < 1.0:
        for token_id, before in zip(ranked, shares_before(ranked, weights), strict=True):
            if before >= params.top_p and token_id != ranked[0]:
                weights[token_id] = 0.0
    total = sum(weights)
    return [weight / total for weight in weights]


def shares_before(ranked: Sequence[int], weights: Sequence[float]) -> list[float]:
    """For each rank, the share of the whole weight that lower ranks hold."""
    total = sum(weights)
    return [sum(weights[token_id] for token_id in ranked[:rank]) / total for rank in range(len(ranked))]


def ranked_ids(values: Sequence[float]) -> list[int]:
    """Ids by descending value, ties by ascending id."""
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


def drawn_token(probability: Sequence[float], random: float) -> int:
    """The first token, in id order, at which the running sum of probability passes the random number."""
    reached = 0.0
    for token_id, share in enumerate(probability):
        reached += share
        if reached > random:
            return token_id
    return max(token_id for token_id, share in enumerate(probability) if share > 0)


def log_probabilities(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    log_sum = math.log(math.fsum(math.exp(logit - largest) for logit in logits))
    return [logit - largest - log_sum for logit in logits]


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers, as the paper writes it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 % 2**32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def random_number(seed: int, *, position: int, choice_index: int, draw: int) -> float:
    w0, w1, _, _ = philox((position, choice_index, draw, 0), (seed % 2**32, seed >> 32))
    return (2 * ((w0 << 20) + (w1 >> 12)) + 1) / 2**53
