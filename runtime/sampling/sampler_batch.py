"""What the sampler does in one step, turned from Python values into tensors: which rows, which rules, which numbers.

Rows that need nothing but the largest logit stay out of all groups (`num_plain`). The others are put together with rows
that need the same kind of work, at most `GROUP_LOGITS` logits at a time, so that a row pays for what it asks and the
work fits into a processor's cache. What it does not know: logits, the model. The grouping changes no result.

Shapes: B rows of the step, n rows of one group, J single entries (token ids of some rows), S request slots.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
import torch
from torch import Tensor

from attention_mla.transfer import to_device

from ..requests.sampling_params import MAX_INT32, SamplingParams
from .philox import uniform

GROUP_LOGITS = 1 << 20
"""8 rows of a vocabulary of 131,072."""
SAMPLE_DRAW = 0
"""The `draw` word of the random counter for the one number that picks a token."""


class SampleRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One token to be sampled. `seed` is the request's own or the one drawn for it at admission."""

    params: SamplingParams
    seed: int
    slot: int
    """Row of the token table that holds the request's tokens."""
    position: int
    """Position of the token being sampled: tokens 0 .. position - 1 are in the table by the time the step samples."""
    prompt_len: int
    """Tokens before this position are prompt, from it on output."""
    choice_index: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end this request; those of `params.stop_token_ids` count anyway."""

    def __post_init__(self) -> None:
        assert 0 <= self.prompt_len <= self.position, (self.prompt_len, self.position)

    @property
    def num_output(self) -> int:
        return self.position - self.prompt_len


class Ranking(IntEnum):
    """How much of the order of the tokens a row must know."""

    NONE = 0
    TOP_K = 1
    """The first top_k."""
    TOP_P = 2
    """As many as hold the share top_p, which only the logits can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    slot_n: Tensor
    position_n1: Tensor
    prompt_len_n1: Tensor
    history_len: int
    """Largest position of the group."""
    repetition_n1: Tensor
    presence_n1: Tensor
    frequency_n1: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """Single logits: entry j is token ids_J[j] of the group's row rows_J[j]; no pair occurs twice."""

    rows_J: Tensor
    ids_J: Tensor
    values_J: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    random_n: Tensor
    """float64 in (0, 1)."""
    temperature_n1: Tensor
    min_p_n1: Tensor | None
    top_k_n1: Tensor
    top_p_n1: Tensor
    ranking: Ranking
    max_top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that are worked on together. What is None is not wanted by any of them; no `draw` means greedy."""

    rows_n: Tensor
    bias: Entries | None
    penalties: Penalties | None
    masked: Entries | None
    """Tokens that must not be sampled; the values are -inf."""
    draw: Draw | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobGroup:
    rows_n: Tensor
    num_top: int
    """Largest number of most likely tokens that a row of the group asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerBatch:
    """The rows of one step, in the order of the rows of logits. `num_plain` of them are in no group."""

    num_rows: int
    num_plain: int
    groups: tuple[Group, ...]
    logprob_groups: tuple[LogprobGroup, ...]

    @classmethod
    def build(
        cls,
        rows: Mapping[int, SampleRow],
        *,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "SamplerBatch":
        """`rows` by their place among the `num_rows` rows of logits; those that are left out are plain.

        Zero rows are an ordinary batch. Nothing is checked here that `SamplingParams` has checked.
        """
        kinds: defaultdict[tuple[bool, Ranking, bool], list[int]] = defaultdict(list)
        for index, row in rows.items():
            kind = _kind(row.params)
            if kind != _PLAIN or row.params.logit_bias or masked_ids(row):
                kinds[kind].append(index)
        groups = [
            _group([rows[index] for index in part], part, device)
            for kind, indices in kinds.items()
            for part in _parts(indices, max(vocab_size, _longest_history(rows, indices) if kind[2] else 0))
        ]
        return cls(
            num_rows=num_rows,
            num_plain=num_rows - sum(map(len, kinds.values())),
            groups=tuple(groups),
            logprob_groups=tuple(logprob_groups(rows, vocab_size, device)),
        )

    @property
    def num_top(self) -> int:
        """Columns of the reported most likely tokens."""
        return max((group.num_top for group in self.logprob_groups), default=0)


_PLAIN = (False, Ranking.NONE, False)


def _kind(params: SamplingParams) -> tuple[bool, Ranking, bool]:
    """Whether a number is drawn, what is ranked for it, and whether the history is looked at."""
    if params.is_greedy:
        return False, Ranking.NONE, params.has_penalties
    return True, _ranking(params), params.has_penalties


def _ranking(params: SamplingParams) -> Ranking:
    if params.top_k > 0:
        return Ranking.TOP_K
    return Ranking.TOP_P if params.top_p < 1.0 else Ranking.NONE


def masked_ids(row: SampleRow) -> frozenset[int]:
    if row.num_output >= row.params.min_tokens:
        return frozenset()
    return row.stop_ids.union(row.params.stop_token_ids)


def _longest_history(rows: Mapping[int, SampleRow], indices: Iterable[int]) -> int:
    return max([rows[index].position for index in indices])


def _parts(indices: Sequence[int], width: int) -> Iterable[Sequence[int]]:
    """Rows of `width` numbers each, as many together as `GROUP_LOGITS` allows."""
    size = max(GROUP_LOGITS // width, 1)
    return (indices[start : start + size] for start in range(0, len(indices), size))


def _group(members: Sequence[SampleRow], indices: Sequence[int], device: torch.device | str) -> Group:
    """Rows of one kind, and their places among the logits."""
    is_drawn, ranking, has_penalties = _kind(members[0].params)
    biases = [(n, token_id, value) for n, row in enumerate(members) for token_id, value in _bias_items(row)]
    masked = [(n, token_id, -torch.inf) for n, row in enumerate(members) for token_id in sorted(masked_ids(row))]
    return Group(
        rows_n=int_column(indices, device),
        bias=entries_of(biases, device),
        penalties=_penalties(members, device) if has_penalties else None,
        masked=entries_of(masked, device),
        draw=_draw(members, ranking, device) if is_drawn else None,
    )


def _bias_items(row: SampleRow) -> Iterable[tuple[int, float]]:
    return (row.params.logit_bias or {}).items()


def entries_of(entries: Sequence[tuple[int, int, float]], device: torch.device | str) -> Entries | None:
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return Entries(
        rows_J=int_column(rows, device),
        ids_J=int_column(ids, device),
        values_J=_column(values, device)[:, 0],
    )


def _penalties(members: Sequence[SampleRow], device: torch.device | str) -> Penalties:
    return Penalties(
        slot_n=int_column([row.slot for row in members], device),
        position_n1=int_column([row.position for row in members], device)[:, None],
        prompt_len_n1=int_column([row.prompt_len for row in members], device)[:, None],
        history_len=max(row.position for row in members),
        repetition_n1=_column([row.params.repetition_penalty for row in members], device),
        presence_n1=_column([row.params.presence_penalty for row in members], device),
        frequency_n1=_column([row.params.frequency_penalty for row in members], device),
    )


def _draw(members: Sequence[SampleRow], ranking: Ranking, device: torch.device | str) -> Draw:
    random_n = uniform(
        [row.seed for row in members],
        positions=[row.position for row in members],
        choices=[row.choice_index for row in members],
        draw=SAMPLE_DRAW,
    )
    params = [row.params for row in members]
    top_ks = [each.top_k if each.top_k > 0 else MAX_INT32 for each in params]
    min_ps = [each.min_p for each in params]
    return Draw(
        random_n=to_device(random_n, device),
        temperature_n1=_column([each.temperature for each in params], device),
        min_p_n1=_column(min_ps, device) if any(min_ps) else None,
        top_k_n1=int_column(top_ks, device)[:, None],
        top_p_n1=_column([each.top_p for each in params], device),
        ranking=ranking,
        max_top_k=max(top_ks),
    )


def int_column(values: Sequence[int], device: torch.device | str) -> Tensor:
    """int64 [n]; by way of numpy, which reads a list several times as fast as torch does."""
    return to_device(np.array(values, dtype=np.int64), device)


def _column(values: Sequence[float], device: torch.device | str) -> Tensor:
    """float64 [n, 1]."""
    return to_device(np.array(values, dtype=np.float64), device)[:, None]


def logprob_groups(
    rows: Mapping[int, SampleRow], vocab_size: int, device: torch.device | str
) -> Iterable[LogprobGroup]:
    wanted = {index: row.params.logprobs for index, row in rows.items() if row.params.logprobs is not None}
    by_num_top = sorted(wanted, key=lambda index: wanted[index])
    for part in _parts(by_num_top, vocab_size):
        yield LogprobGroup(rows_n=int_column(part, device), num_top=max([wanted[index] for index in part]))
