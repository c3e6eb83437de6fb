"""The spans behind a step's decode rows, as kernels read them: lengths and pages, nothing cut yet.

Letters: T tokens here, B spans, G pages.
"""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Absorbed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Absorbed:
    """Spans one after the other; every tensor is int64.

    Pages of all spans lie end to end, so a table of fixed width serves as well as a ragged one. A span of no tokens or
    no context is skipped: padding.
    """

    pages_G: Tensor
    first_page_B: Tensor
    """Where in `pages_G` a span's pages begin."""
    first_token_B: Tensor
    """Index into T."""
    num_tokens_B: Tensor
    context_B: Tensor
    """Tokens in the cache once this step's are appended."""
    total_context: int
    """At least the sum of the contexts. The host knows it, so room for the work is made without asking the device."""
    most_tokens: int
    """At least the largest number of tokens of one span."""

    @property
    def num_requests(self) -> int:
        return self.context_B.shape[0]
