"""What was routed where, step by step, in a file: written while decoding, read by planning and reports.

    counts    int32 [N, Y, E]   pairs that each layer sent to each expert
    tokens    int64 [N]         tokens behind them
    steps     int64 [N]         steps a row is made of: one, until the recording is long
    experts   int32 [M, Y, K]   on request: the experts of single tokens, the first M of them
    of_steps  int64 [M]         the step of each of these tokens, counted from 0

A recording of any length has a bounded size: when `max_rows` are full, every two rows become one. The file is
safetensors, with what it is about in its metadata. Knows no transport: a rank writes its own, `Recording.total` adds
them.

Legend: N rows, Y the MoE layers of a model, E experts, T tokens of a step, M recorded tokens, K top-k.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

FORMAT = "serried-routing-1"
_NUMBERS = ("num_layers", "num_experts", "top_k", "num_ranks")
_MOST_RANKS = 1 << 16
_MOST = 1 << 40
"""Tokens or steps of a row; so no sum of a recording, or of those of all ranks, leaves int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A recording in memory; see the module's table for the arrays."""

    counts_NYE: np.ndarray
    tokens_N: np.ndarray
    steps_N: np.ndarray
    top_k: int
    num_ranks: int
    """Ranks of the group that was recorded."""
    model: str = ""
    experts_MYK: np.ndarray | None = None
    of_steps_M: np.ndarray | None = None

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.counts_NYE.shape[1]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.counts_NYE.shape[2]

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return int(self.tokens_N.sum())

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        return int(self.steps_N.sum())

    @property
    def loads_YE(self) -> np.ndarray:
        """int64 [Y, E] counts of all steps together."""
        return self.counts_NYE.sum(axis=0, dtype=np.int64)

    @classmethod
    def read(cls, path: Path | str) -> Recording:
        """Read a file. Raises ValueError, in words, for one that is no recording, is cut short or contradicts itself;
        OSError when it cannot be read."""
        path = Path(path)
        with path.open("rb"):
            pass  # an absent file is an OSError that names it
        try:
            with safe_open(path, framework="numpy") as file:
                about, arrays = dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"{path} cannot be read as a recording: {error}") from error
        try:
            return _checked(about, arrays)
        except ValueError as error:
            raise ValueError(f"{path} is not a recording of routing: {error}") from error

    @classmethod
    def total(cls, recordings: Sequence[Recording]) -> Recording:
        """The ranks of a group together, row by row. Raises ValueError when they are not of the same steps."""
        first = recordings[0]
        shape = first.counts_NYE.shape
        for other in recordings[1:]:
            alike = (other.top_k, other.num_ranks, other.model) == (first.top_k, first.num_ranks, first.model)
            if not alike or other.counts_NYE.shape != shape or not np.array_equal(other.steps_N, first.steps_N):
                raise ValueError("the recordings are not of the same steps of one model; give those of one run's ranks")
        return replace(
            first,
            counts_NYE=np.sum([each.counts_NYE for each in recordings], axis=0, dtype=np.int64),
            tokens_N=np.sum([each.tokens_N for each in recordings], axis=0),
            experts_MYK=_joined([each.experts_MYK for each in recordings]),
            of_steps_M=_joined([each.of_steps_M for each in recordings]),
        )


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def _checked(about: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> Recording:
    """The recording that a file's parts make up. Raises ValueError that says what is wrong with them."""
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format')!r:.60}; it must be {FORMAT!r}")
    num_layers, num_experts, top_k, num_ranks = [_number(about, name) for name in _NUMBERS]
    counts = _array(arrays, "counts", np.int32, (None, num_layers, num_experts))
    tokens = _array(arrays, "tokens", np.int64, (len(counts),))
    steps = _array(arrays, "steps", np.int64, (len(counts),))
    if len(steps) and steps.min() < 1:
        raise ValueError(f"steps holds {steps.min()}; a row is made of at least 1 step")
    for name, numbers in (("tokens", tokens), ("steps", steps)):
        if numbers.max(initial=0) > _MOST:
            raise ValueError(f"{name} holds {numbers.max()}; a row has at most {_MOST}")
    if top_k > num_experts:
        raise ValueError(f"top_k is {top_k}; a token cannot visit more than the {num_experts} experts")
    totals = counts.sum(axis=2, dtype=np.int64)
    row, layer = np.nonzero(totals != (tokens * top_k)[:, None])
    if len(row):
        raise ValueError(
            f"row {row[0]} has {tokens[row[0]]} tokens x top_k {top_k}, but layer {layer[0]} counts "
            f"{totals[row[0], layer[0]]} pairs"
        )
    experts = of_steps = None
    if "experts" in arrays:
        experts = _array(arrays, "experts", np.int32, (None, num_layers, top_k))
        of_steps = _array(arrays, "of_steps", np.int64, (len(experts),))
        if experts.size and experts.max() >= num_experts:
            raise ValueError(f"experts holds {experts.max()}; there are {num_experts} experts, counted from 0")
        if of_steps.max(initial=-1) >= steps.sum():
            raise ValueError(f"of_steps holds {of_steps.max()}; there are {steps.sum()} steps, counted from 0")
    return Recording(
        counts_NYE=counts,
        tokens_N=tokens,
        steps_N=steps,
        top_k=top_k,
        num_ranks=num_ranks,
        model=about.get("model", ""),
        experts_MYK=experts,
        of_steps_M=of_steps,
    )


def _number(about: Mapping[str, str], name: str) -> int:
    text = about.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= _MOST_RANKS):
        raise ValueError(f"{name} is {text!r:.60}; it must be a whole number from 1 to {_MOST_RANKS}")
    return int(text)


def _array(
    arrays: Mapping[str, np.ndarray], name: str, dtype: type[np.generic], shape: tuple[int | None, ...]
) -> np.ndarray:
    """One of the arrays; a length of None may be any. All of them count something: none holds a negative number."""
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"{name} is missing")
    fits = len(array.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        wanted = ["any" if length is None else length for length in shape]
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}; it must be {np.dtype(dtype)} {wanted}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name} holds {array.min()}; it must hold numbers from 0 on")
    return array


class RoutingRecorder:
    """Collects the counts of one rank's steps and writes them when it is closed.

    max_rows       rows kept, an even number; longer recordings get coarser
    max_token_ids  tokens whose experts are kept one by one: the first so many
    """

    def __init__(
        self,
        path: Path | str,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        num_ranks: int = 1,
        model: str = "",
        max_rows: int = 4096,
        max_token_ids: int = 0,
    ) -> None:
        assert max_rows >= 2, f"max_rows {max_rows}"
        assert max_rows % 2 == 0, f"max_rows {max_rows}"
        self._path = Path(path)
        self._about = {
            "format": FORMAT,
            "num_layers": str(num_layers),
            "num_experts": str(num_experts),
            "top_k": str(top_k),
            "num_ranks": str(num_ranks),
            "model": model,
        }
        self._shape, self._top_k, self._max_rows = (num_layers, num_experts), top_k, max_rows
        self._room = max_token_ids
        self._counts: list[np.ndarray] = []
        self._tokens: list[int] = []
        self._steps: list[int] = []
        self._steps_per_row = 1
        self._experts: list[np.ndarray] = []
        self._of_steps: list[np.ndarray] = []
        self._num_steps = 0

    def add(self, counts_YE: Tensor, *, num_tokens: int) -> None:
        """One step: as `ExpertLoad.add`."""
        assert tuple(counts_YE.shape) == self._shape, f"{tuple(counts_YE.shape)} for {self._shape}"
        counts = counts_YE.cpu().numpy().astype(np.int32)
        self._num_steps += 1
        if self._steps and self._steps[-1] < self._steps_per_row:
            self._counts[-1] += counts
            self._tokens[-1] += num_tokens
            self._steps[-1] += 1
            return
        if len(self._steps) == self._max_rows:
            self._halve()
        self._counts.append(counts)
        self._tokens.append(num_tokens)
        self._steps.append(1)

    def add_experts(self, experts_YTK: Tensor) -> None:
        """The experts of the tokens of the step that was added last, as long as there is room; padded rows, which have
        expert -1, are left out."""
        if not self._room or not experts_YTK.shape[1]:
            return
        real_T = experts_YTK[0, :, 0] >= 0
        tokens_TYK = experts_YTK[:, real_T][:, : self._room].cpu().numpy().transpose(1, 0, 2).astype(np.int32)
        self._room -= len(tokens_TYK)
        if len(tokens_TYK):
            self._experts.append(tokens_TYK)
            self._of_steps.append(np.full(len(tokens_TYK), self._num_steps - 1, np.int64))

    def _halve(self) -> None:
        """Rows 0 and 1 become one, 2 and 3, and so on; all are full at this moment."""
        self._counts = [one + two for one, two in zip(self._counts[::2], self._counts[1::2], strict=True)]
        self._tokens = [one + two for one, two in zip(self._tokens[::2], self._tokens[1::2], strict=True)]
        self._steps = [one + two for one, two in zip(self._steps[::2], self._steps[1::2], strict=True)]
        self._steps_per_row *= 2

    def close(self) -> None:
        """Write the file; it appears when it is complete. Raises OSError when it cannot be written."""
        arrays = {
            "counts": np.array(self._counts, np.int32).reshape(-1, *self._shape),
            "tokens": np.array(self._tokens, np.int64),
            "steps": np.array(self._steps, np.int64),
        }
        if self._experts:
            arrays |= {"experts": np.concatenate(self._experts), "of_steps": np.concatenate(self._of_steps)}
        # The writer takes memory as it lies, whatever the strides say.
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            save_file(arrays, unfinished, metadata=self._about)
            os.replace(unfinished, self._path)
        except SafetensorError as error:
            raise OSError(f"{self._path} cannot be written: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)
