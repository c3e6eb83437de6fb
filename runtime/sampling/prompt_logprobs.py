"""How likely the tokens of a prompt were: log-probabilities of prompt tokens, for requests that ask for them.

    position    0     1     2     3          a chunk of positions 0 .. 2 says how likely tokens 1 .. 3 were;
    logits of   1     2     3     (sampled)  the last position's logits are the sampler's, and of token 0 nobody knows

The head is run over a few positions at a time, so that a long prompt costs time and no room. What a step finds is kept
on the request when the step is known to be clean, by position: a prompt that is computed again writes the same again.
Knows rows and hidden states; does not know the schedule.

Shapes: T tokens here, P prompt positions that are asked for, D model, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..requests.ledger import Column
from ..requests.outputs import TokenLogprob
from ..requests.request import Request
from ..requests.rows import Rows
from .sampler import rank_ids

AT_ONCE = 64
"""Positions whose logits are in memory at a time."""


class PromptPart(NamedTuple):
    """A row's positions whose next token is one of the prompt: token `first` and those after it."""

    request: Request
    first: int
    num: int
    begin_T: int
    """Where the first of these positions is among the step's tokens."""

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens."""
        return self.request.prompt[self.first : self.first + self.num]


class PromptLogprobs(NamedTuple):
    """On the device, all parts one after the other."""

    parts: Sequence[PromptPart]
    logprob_P: Tensor
    top_ids_PK: Tensor
    top_logprobs_PK: Tensor


def asked_parts(rows: Rows, first_B: Column) -> list[PromptPart]:
    """What is asked of a step's rows; first_B: where each row begins among the step's tokens."""
    parts = []
    for index in rows.is_prefill_B.nonzero()[0].tolist():
        request = rows.requests[index]
        if request.prompt_logprobs is None:
            continue
        start = int(rows.start_B[index])
        count = min(int(rows.num_tokens_B[index]), len(request.prompt) - 1 - start)
        if count > 0:
            parts.append(PromptPart(request, start + 1, count, int(first_B[index])))
    return parts


def positions(parts: Sequence[PromptPart]) -> Tensor:
    """int64 [P] indices into T, on the host."""
    return torch.cat([torch.arange(part.begin_T, part.begin_T + part.num) for part in parts])


def look_up(parts: Sequence[PromptPart], hidden_PD: Tensor, *, head: Callable[[Tensor], Tensor]) -> PromptLogprobs:
    """The log-softmax of each position's logits at the token that follows, and the most likely ones."""
    targets = torch.tensor([token for part in parts for token in part.targets], device=hidden_PD.device)
    num_top = max([part.request.params.prompt_logprobs or 0 for part in parts])
    found = [
        _look_up(head(some_PD), some_P, num_top)
        for some_PD, some_P in zip(hidden_PD.split(AT_ONCE), targets.split(AT_ONCE), strict=True)
    ]
    logprobs, ids, tops = zip(*found, strict=True)
    return PromptLogprobs(parts, torch.cat(logprobs), torch.cat(ids), torch.cat(tops))


def _look_up(logits_PV: Tensor, targets_P: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_PV = logits_PV.log_softmax(dim=-1)
    logprob_P = logprobs_PV.gather(1, targets_P[:, None])[:, 0]
    if not num_top:
        none_PK = targets_P.new_empty(len(targets_P), 0)
        return logprob_P, none_PK, none_PK.to(logits_PV.dtype)
    usable_P1 = logits_PV.isfinite().all(dim=1, keepdim=True)  # what is NaN cannot be ranked; it is reported as it is
    ids_PK = rank_ids(torch.where(usable_P1, logits_PV, 0.0), min(num_top, logits_PV.shape[1]))
    return logprob_P, ids_PK, logprobs_PV.gather(1, ids_PK)


def keep(found: PromptLogprobs) -> None:
    """Wait for the device, and write what it found on the requests that still want it."""
    logprobs, ids, tops = found.logprob_P.tolist(), found.top_ids_PK.tolist(), found.top_logprobs_PK.tolist()
    place = 0
    for part in found.parts:
        known, num_top = part.request.prompt_logprobs, part.request.params.prompt_logprobs or 0
        if known is not None:
            for offset, token in enumerate(part.targets):
                at = place + offset
                top = dict(zip(ids[at][:num_top], tops[at][:num_top], strict=True))
                known[part.first + offset] = TokenLogprob(token, logprobs[at], top)
        place += part.num
