"""What rows ask of the sampler, as columns of numbers on the device: what its kernels read.

Rows that are not asked about take the largest logit. Rows whose logits are changed before anything is chosen (bias,
penalties, tokens that may not come yet) are told apart, for only they need logits of their own. Knows `SampleRow`s;
does not know logits.

Letters: B rows of the step, n of them that are edited, J single entries, K columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention_mla.transfer import to_device

from ..requests.sampling_params import MAX_INT32
from .sampler_batch import Entries, SampleRow, entries_of, int_column, masked_ids

__all__ = ["Columns", "PenaltyColumns", "SamplerTable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """How each of B rows chooses."""

    ints_KB: Tensor
    """int64: top_k, the bits of the seed, position, choice index."""
    floats_KB: Tensor
    """float64: temperature (0: the largest logit), top_p, min_p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyColumns:
    """Of the edited rows; one without penalties has a history of no tokens."""

    ints_KN: Tensor
    """int64: slot, position, prompt length."""
    floats_KN: Tensor
    """float64: repetition, frequency, presence."""
    history_len: int
    """The largest position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerTable:
    """One step's rows."""

    columns: Columns
    plain_n: Tensor
    """int64 places among the logits of rows that are chosen from as they are."""
    edited_n: Tensor
    """Those of the others."""
    bias: Entries | None
    penalties: PenaltyColumns | None
    masked: Entries | None

    @classmethod
    def build(
        cls, rows: Mapping[int, SampleRow], *, num_rows: int, edit_all: bool, device: torch.device | str
    ) -> SamplerTable:
        """`rows` by their place among the `num_rows` rows of logits; those that are left out take the largest.

        edit_all   no row is chosen from as it is: the logits are of a type that the kernel does not read
        """
        edited = [place for place, row in rows.items() if edit_all or _is_edited(row)]
        if edit_all:
            edited += [place for place in range(num_rows) if place not in rows]
        others = np.setdiff1d(np.arange(num_rows), np.array(edited, dtype=np.int64))
        members = [rows.get(place) for place in edited]
        asking = [(n, row) for n, row in enumerate(members) if row is not None]
        biases = [(n, token, bias) for n, row in asking for token, bias in (row.params.logit_bias or {}).items()]
        masked = [(n, token, -torch.inf) for n, row in asking for token in sorted(masked_ids(row))]
        return cls(
            columns=_columns(rows, num_rows, device),
            plain_n=to_device(others, device),
            edited_n=int_column(edited, device),
            bias=entries_of(biases, device),
            penalties=_penalties(members, device),
            masked=entries_of(masked, device),
        )


def _is_edited(row: SampleRow) -> bool:
    return bool(row.params.has_penalties or row.params.logit_bias or masked_ids(row))


def _columns(rows: Mapping[int, SampleRow], num_rows: int, device: torch.device | str) -> Columns:
    ints_KB, floats_KB = np.zeros((4, num_rows), dtype=np.int64), np.zeros((3, num_rows), dtype=np.float64)
    seeds_B = ints_KB[1].view(np.uint64)
    for place, row in rows.items():
        params = row.params
        top_k = params.top_k if params.top_k > 0 else MAX_INT32
        ints_KB[:, place] = top_k, 0, row.position, row.choice_index
        seeds_B[place] = row.seed
        floats_KB[:, place] = 0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p
    return Columns(ints_KB=to_device(ints_KB, device), floats_KB=to_device(floats_KB, device))


def _penalties(members: Sequence[SampleRow | None], device: torch.device | str) -> PenaltyColumns | None:
    history = [row if row is not None and row.params.has_penalties else None for row in members]
    if not any(history):
        return None
    ints_KN = np.zeros((3, len(members)), dtype=np.int64)
    floats_KN = np.ones((3, len(members)), dtype=np.float64)
    for n, row in enumerate(history):
        if row is not None:
            params = row.params
            ints_KN[:, n] = row.slot, row.position, row.prompt_len
            floats_KN[:, n] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return PenaltyColumns(
        ints_KN=to_device(ints_KN, device),
        floats_KN=to_device(floats_KN, device),
        history_len=int(ints_KN[1].max()),
    )
