"""What a scheduler may be asked to hold: its configuration, and the longest request that can ever end.

Pure arithmetic on lengths; knows no request that runs and no page that is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ep.errors import RequestError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How one rank fills its steps."""

    max_num_batched_tokens: int = 8192
    """Tokens one step computes on a rank, at most: prompts are cut into chunks that fit."""

    max_num_seqs: int = 256
    """Requests that run at the same time on a rank, at most."""

    scheduling_policy: Policy = "fcfs"
    """Who is served first: fcfs goes by arrival, priority by the request's priority (lower first), then by arrival."""

    max_model_len: int | None = None
    """Prompt and output together, in tokens; unset: as many as the model allows."""

    enable_prefix_caching: bool = True
    """Keep the latents of full pages after their request ended, for requests that start with the same tokens."""

    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in one step, at most, so that a long one leaves room for others; 0: no such limit."""

    def __post_init__(self) -> None:
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, neighbour=8192)
        at_least("max_num_seqs", self.max_num_seqs, 1, neighbour=256)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, neighbour=0)
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2, neighbour=4096)
        if self.scheduling_policy not in get_args(Policy):
            names = ", ".join(get_args(Policy))
            raise ValueError(f"scheduling_policy is {self.scheduling_policy!r}; it must be one of {names}, e.g. fcfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The longest request a rank can hold, alone."""

    max_model_len: int
    num_pages: int
    page_size: int

    def max_len(self, prompt_len: int, max_tokens: int | None) -> int:
        """Tokens of prompt and output at which a request ends, at the latest.

        `RequestError` when the prompt is empty, leaves no room for a token, or could outgrow the whole cache.
        """
        if prompt_len < 1:
            raise RequestError(field="prompt", value="0 tokens", rule="must have at least 1 token")
        longest = self.max_model_len - 1
        if prompt_len > longest:
            rule = (
                f"must have at most {longest} tokens: max_model_len is {self.max_model_len}, and one token is to follow"
            )
            raise RequestError(field="prompt", value=f"{prompt_len} tokens", rule=rule)
        max_len = self.max_model_len if max_tokens is None else min(prompt_len + max_tokens, self.max_model_len)
        if -(-max_len // self.page_size) > self.num_pages:
            raise self._too_long(prompt_len, max_len)
        return max_len

    def _too_long(self, prompt_len: int, max_len: int) -> RequestError:
        room = self.num_pages * self.page_size
        rule = (
            f"with up to {max_len - prompt_len} tokens of output it needs {-(-max_len // self.page_size)} pages of "
            f"{self.page_size} tokens, and the whole cache has {self.num_pages} ({room} tokens); "
        )
        allowed = room - prompt_len
        neighbour = f"max_tokens={allowed} would fit" if allowed > 0 else f"a prompt of {room - 1} tokens would fit"
        return RequestError(field="prompt", value=f"{prompt_len} tokens", rule=rule + neighbour)


def at_least(name: str, value: int, low: int, *, neighbour: int) -> None:
    """Raise ValueError unless a setting is a whole number of at least `low`; `neighbour` is one that would do."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}, e.g. {neighbour}")
