"""What the sampler does in one step, turned from Python values into tensors: which rows, which rules, which numbers.

Rows that need nothing but the largest logit stay out of all groups (`num_plain`). The others are put together with rows
that need the same kind of work, at most `GROUP_ROWS` at a time, so that a row pays for what it asks and the work fits
into a processor's cache. What it does not know: logits, the vocabulary, the model. The grouping changes no result.

Shapes: B rows of the step, n rows of one group, J single entries (token ids of some rows), S request slots.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .philox import seed_bits, uniform
from .sampling_params import MAX_INT32, SamplingParams

GROUP_ROWS = 8
SAMPLE_DRAW = 0
"""The `draw` word of the random counter for the one number that picks a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
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
    def build(cls, rows: Sequence[SampleRow], *, device: torch.device | str = "cpu") -> "SamplerBatch":
        """Zero rows are an ordinary batch. Nothing is checked here that `SamplingParams` has checked."""
        kinds: defaultdict[tuple[bool, Ranking, bool], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if not _is_plain(row):
                kinds[_kind(row.params)].append(index)
        drawn = [index for key, indices in kinds.items() if key[0] for index in indices]
        random = dict(zip(drawn, _random_numbers([rows[index] for index in drawn]), strict=True))
        groups = [_group(rows, part, random, device) for indices in kinds.values() for part in _parts(indices)]
        return cls(
            num_rows=len(rows),
            num_plain=len(rows) - sum(map(len, kinds.values())),
            groups=tuple(groups),
            logprob_groups=tuple(_logprob_groups(rows, device)),
        )

    @property
    def num_top(self) -> int:
        """Columns of the reported most likely tokens."""
        return max((group.num_top for group in self.logprob_groups), default=0)


def _is_plain(row: SampleRow) -> bool:
    params = row.params
    return params.is_greedy and not params.has_penalties and not params.logit_bias and not _masked_ids(row)


def _kind(params: SamplingParams) -> tuple[bool, Ranking, bool]:
    return not params.is_greedy, Ranking.NONE if params.is_greedy else _ranking(params), params.has_penalties


def _ranking(params: SamplingParams) -> Ranking:
    if params.top_k > 0:
        return Ranking.TOP_K
    return Ranking.TOP_P if params.top_p < 1.0 else Ranking.NONE


def _masked_ids(row: SampleRow) -> frozenset[int]:
    if row.num_output >= row.params.min_tokens:
        return frozenset()
    return row.stop_ids.union(row.params.stop_token_ids)


def _parts(indices: Sequence[int]) -> Iterable[Sequence[int]]:
    return (indices[start : start + GROUP_ROWS] for start in range(0, len(indices), GROUP_ROWS))


def _random_numbers(rows: Sequence[SampleRow]) -> list[float]:
    if not rows:
        return []
    seed_B = torch.tensor([seed_bits(row.seed) for row in rows])
    position_B = torch.tensor([row.position for row in rows])
    choice_B = torch.tensor([row.choice_index for row in rows])
    return uniform(seed_B, position_B=position_B, choice_B=choice_B, draw=SAMPLE_DRAW).tolist()


def _group(
    rows: Sequence[SampleRow], indices: Sequence[int], random: dict[int, float], device: torch.device | str
) -> Group:
    members = [rows[index] for index in indices]
    is_drawn, ranking, has_penalties = _kind(members[0].params)
    biases = [(n, token_id, value) for n, row in enumerate(members) for token_id, value in _bias_items(row)]
    masked = [(n, token_id, -torch.inf) for n, row in enumerate(members) for token_id in sorted(_masked_ids(row))]
    return Group(
        rows_n=torch.tensor(indices, device=device),
        bias=_entries(biases, device),
        penalties=_penalties(members, device) if has_penalties else None,
        masked=_entries(masked, device),
        draw=_draw(members, [random[index] for index in indices], ranking, device) if is_drawn else None,
    )


def _bias_items(row: SampleRow) -> Iterable[tuple[int, float]]:
    return (row.params.logit_bias or {}).items()


def _entries(entries: Sequence[tuple[int, int, float]], device: torch.device | str) -> Entries | None:
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return Entries(
        rows_J=torch.tensor(rows, device=device),
        ids_J=torch.tensor(ids, device=device),
        values_J=_column(values, device)[:, 0],
    )


def _penalties(members: Sequence[SampleRow], device: torch.device | str) -> Penalties:
    return Penalties(
        slot_n=torch.tensor([row.slot for row in members], device=device),
        position_n1=torch.tensor([[row.position] for row in members], device=device),
        prompt_len_n1=torch.tensor([[row.prompt_len] for row in members], device=device),
        history_len=max(row.position for row in members),
        repetition_n1=_column([row.params.repetition_penalty for row in members], device),
        presence_n1=_column([row.params.presence_penalty for row in members], device),
        frequency_n1=_column([row.params.frequency_penalty for row in members], device),
    )


def _draw(members: Sequence[SampleRow], random: Sequence[float], ranking: Ranking, device: torch.device | str) -> Draw:
    top_ks = [row.params.top_k if row.params.top_k > 0 else MAX_INT32 for row in members]
    min_ps = [row.params.min_p for row in members]
    return Draw(
        random_n=_column(random, device)[:, 0],
        temperature_n1=_column([row.params.temperature for row in members], device),
        min_p_n1=_column(min_ps, device) if any(min_ps) else None,
        top_k_n1=torch.tensor(top_ks, device=device)[:, None],
        top_p_n1=_column([row.params.top_p for row in members], device),
        ranking=ranking,
        max_top_k=max(top_ks),
    )


def _column(values: Sequence[float], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _logprob_groups(rows: Sequence[SampleRow], device: torch.device | str) -> Iterable[LogprobGroup]:
    wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    by_num_top = sorted(wanted, key=lambda index: wanted[index])
    for part in _parts(by_num_top):
        yield LogprobGroup(
            rows_n=torch.tensor(part, device=device),
            num_top=max(wanted[index] for index in part),
        )
