"""From logits to tokens behind one name: in torch (`sampler`), or in Triton's kernels (`sampler_kernels`).

Chosen once, at start. Log-probabilities are torch's in both. Knows rows and logits; does not know requests or steps.

Shapes: B rows of logits, V vocabulary, S request slots, H history, n rows of one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ep.ops import import_kernels

from .sampler import Sampled, SamplerBatch, SampleRow, report, sample
from .sampler_batch import logprob_groups
from .sampler_table import SamplerTable

__all__ = ["SamplerOps", "sampler_ops"]


class SamplerOps(Protocol):
    """How tokens are chosen."""

    def choose(self, logits_BV: Tensor, rows: Mapping[int, SampleRow], tokens_SH: Tensor) -> Sampled:
        """A token for each row of logits; `rows` by their place among them, those left out take the largest logit.

        tokens_SH is the token table, where rows with penalties read their history.
        """
        ...


class ReferenceOps:
    """In torch, on any device. Some filters make the host wait."""

    def choose(self, logits_BV: Tensor, rows: Mapping[int, SampleRow], tokens_SH: Tensor) -> Sampled:
        num_rows, vocab_size = logits_BV.shape
        batch = SamplerBatch.build(rows, num_rows=num_rows, vocab_size=vocab_size, device=logits_BV.device)
        return sample(logits_BV, batch, tokens_SH)


class TritonOps:
    """In Triton's kernels: nothing is sorted. The host waits only where log-probabilities are asked for."""

    def __init__(self) -> None:
        self._kernels = import_kernels(".sampler_kernels", __package__)

    def choose(self, logits_BV: Tensor, rows: Mapping[int, SampleRow], tokens_SH: Tensor) -> Sampled:
        (num_rows, vocab_size), device = logits_BV.shape, logits_BV.device
        edit_all = logits_BV.dtype is not torch.float32
        table = SamplerTable.build(rows, num_rows=num_rows, edit_all=edit_all, device=device)
        token_B = torch.empty(num_rows, dtype=torch.int64, device=device)
        ok_B = torch.empty(num_rows, dtype=torch.bool, device=device)
        into = {"token_B": token_B, "ok_B": ok_B}
        self._kernels.choose(logits_BV, None, table.plain_n, table.columns, **into)
        if table.edited_n.shape[0]:
            x_nV = self._edited(logits_BV, table, tokens_SH)
            self._kernels.choose(logits_BV, x_nV, table.edited_n, table.columns, **into)
        return report(logits_BV, logprob_groups(rows, vocab_size, device), token_B=token_B, ok_B=ok_B)

    def _edited(self, logits_BV: Tensor, table: SamplerTable, tokens_SH: Tensor) -> Tensor:
        """Float64 logits of the edited rows, after bias, penalties and masks."""
        x_nV = logits_BV[table.edited_n].to(torch.float64)
        if table.bias is not None:
            x_nV[table.bias.rows_J, table.bias.ids_J] += table.bias.values_J
        if table.penalties is not None:
            counts_nV = torch.empty(x_nV.shape, dtype=torch.int32, device=x_nV.device)
            self._kernels.penalise(x_nV, tokens_SH, table.penalties, counts_nV=counts_nV)
        if table.masked is not None:
            x_nV[table.masked.rows_J, table.masked.ids_J] = table.masked.values_J
        return x_nV


OPS: dict[str, Callable[[], SamplerOps]] = {"reference": ReferenceOps, "numba": ReferenceOps, "triton": TritonOps}


def sampler_ops(name: str) -> SamplerOps:
    """The ops of that name. ValueError if they need a package that is not installed."""
    return OPS[name]()
