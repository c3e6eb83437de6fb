"""From what a caller asks to a request that can run: checked, named, numbered, and with a seed of its own.

Knows the model's vocabulary and the ranks' capacities; does not know which rank will take it (see `placing`), nor a
tensor library: a front without a model makes its requests here, too.
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep.errors import RequestError

from ..requests.admission import Capacity
from ..requests.kv_params import KvParams
from ..requests.refusals import check_names, check_params, check_prompt, check_rank
from ..requests.request import Request, ending_ids
from ..requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # it needs torch
    from ..model.model_config import ModelConfig

SEED_BITS = 53
"""Of a seed that is drawn: it survives readers of JSON that keep numbers as doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What requests are checked against."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    capacities: tuple[Capacity, ...]
    """Of each rank."""

    @classmethod
    def of(cls, model: ModelConfig, capacities: tuple[Capacity, ...]) -> Bounds:
        """Those of a model on these ranks."""
        return cls(vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, capacities=capacities)


class Intake:
    """Makes the requests of one engine. `seed` is where the seeds of requests that bring none are drawn from."""

    def __init__(self, bounds: Bounds, *, seed: int) -> None:
        self._bounds = bounds
        self._seeds = random.Random(seed)
        self._num_made = 0

    def make(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        taken: Container[str],
        kv: KvParams | None = None,
    ) -> Request:
        """A new request; `taken` holds the ids in use. Raises RequestError (field, value, rule)."""
        prompt = check_prompt(prompt_token_ids, self._bounds.vocab_size)
        check_params(params, self._bounds.vocab_size)
        check_names(request_id=request_id, priority=priority, cache_salt=cache_salt)
        name = request_id if request_id is not None else f"request-{self._num_made}"
        if name in taken:
            raise RequestError(field="request_id", value=name, rule="is in use; choose another or leave it out")
        self._num_made += 1
        return Request(
            id=name,
            prompt=prompt,
            params=params,
            arrival=self._num_made,
            priority=priority,
            cache_salt=cache_salt,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(SEED_BITS),
            stop_ids=ending_ids(params, self._bounds.eos_token_ids),
            kv=kv,
        )

    def choices(self, request: Request, ids: Sequence[str]) -> list[Request]:
        """As many answers to one prompt, by these names; seed and choice index tell their random numbers apart."""
        self._num_made += len(ids)
        return [
            Request(
                id=name,
                prompt=request.prompt,
                params=request.params,
                arrival=request.arrival,
                priority=request.priority,
                choice_index=index,
                seed=request.seed,
                cache_salt=request.cache_salt,
                stop_ids=request.stop_ids,
                kv=request.kv,
            )
            for index, name in enumerate(ids)
        ]

    def check_fits(self, request: Request, rank: int | None) -> None:
        """Raise RequestError unless the rank that is asked for, or any if none is, can hold the request alone."""
        if rank is not None:
            check_rank(rank, len(self._bounds.capacities))
        capacities = self._bounds.capacities
        largest = max(capacities, key=lambda capacity: capacity.num_pages * capacity.page_size)
        capacity = largest if rank is None else capacities[rank]
        capacity.max_len(len(request.prompt), request.params.max_tokens)
