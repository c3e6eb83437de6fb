"""From what a caller asks to a request that can run: checked, named, numbered, and with a seed of its own.

Knows the model's vocabulary and the ranks' capacities; does not know which rank will take it (see `placing`).
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

from ep import RequestError

from .ranks import GroupFacts
from .refusals import check_names, check_params, check_prompt, check_rank
from .request import Request, ending_ids
from .sampling_params import SamplingParams

SEED_BITS = 53
"""Of a seed that is drawn: it survives readers of JSON that keep numbers as doubles."""


class Intake:
    """Makes the requests of one engine. `seed` is where the seeds of requests that bring none are drawn from."""

    def __init__(self, facts: GroupFacts, *, num_ranks: int, seed: int) -> None:
        self._facts = facts
        self._num_ranks = num_ranks
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
    ) -> Request:
        """A new request; `taken` holds the ids in use. Raises RequestError (field, value, rule)."""
        model = self._facts.model
        prompt = check_prompt(prompt_token_ids, model.vocab_size)
        check_params(params, model.vocab_size)
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
            stop_ids=ending_ids(params, model.eos_token_ids),
        )

    def check_fits(self, request: Request, rank: int | None) -> None:
        """Raise RequestError unless the rank that is asked for, or any if none is, can hold the request alone."""
        if rank is not None:
            check_rank(rank, self._num_ranks)
        capacities = self._facts.capacities
        largest = max(capacities, key=lambda capacity: capacity.num_pages * capacity.page_size)
        capacity = largest if rank is None else capacities[rank]
        capacity.max_len(len(request.prompt), request.params.max_tokens)
