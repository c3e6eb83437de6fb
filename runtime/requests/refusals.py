"""What is checked of a request at the engine's door, so that nothing behind it has to check again.

A value that a rank could stumble over ends every request of its group; here it ends one, with the field, the value and
the rule. Knows types and the vocabulary's size; not whether the request fits (see `admission`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from ep.errors import RequestError

from .sampling_params import SamplingParams

SHOWN = 60
MAX_PRIORITY = 2**63 - 1


def check_prompt(prompt_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The prompt as Python's own integers; NumPy's and torch's are taken too. Raises RequestError."""
    try:
        tokens = tuple(prompt_token_ids)
    except TypeError:
        raise _refused("prompt", prompt_token_ids, "must be a sequence of token ids, e.g. [1, 2, 3]") from None
    if not tokens:
        raise _refused("prompt", [], "must hold at least one token, e.g. [1]")
    return tuple(_token(place, token, vocab_size) for place, token in enumerate(tokens))


def _token(place: int, token: object, vocab_size: int) -> int:
    rule = f"must be a token id from 0 to {vocab_size - 1}, the vocabulary's last, e.g. {vocab_size - 1}"
    if isinstance(token, bool):
        raise _refused(f"prompt[{place}]", token, rule)
    try:
        index = operator.index(token)  # type: ignore[arg-type]  # what is no integer raises
    except TypeError:
        raise _refused(f"prompt[{place}]", token, rule) from None
    if not 0 <= index < vocab_size:
        raise _refused(f"prompt[{place}]", token, rule)
    return index


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for what are no sampling parameters, or name a token that the vocabulary has not."""
    if not isinstance(params, SamplingParams):
        raise _refused("params", params, "must be SamplingParams, e.g. SamplingParams(temperature=0.0)")
    params.check_vocab(vocab_size)


def check_names(*, request_id: str | None, priority: int, cache_salt: str) -> None:
    """Raises RequestError unless the names are text and the priority is a whole number."""
    for field, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if value is None and field == "request_id":
            continue
        if not isinstance(value, str) or not _is_utf8(value):
            raise _refused(field, value, 'must be text that can be written as UTF-8, e.g. "a"')
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise _refused("priority", priority, "must be a whole number of at most 63 bits, e.g. 0")


def check_rank(rank: int, num_ranks: int) -> None:
    """Raises RequestError unless there is such a rank."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < num_ranks:
        raise _refused("rank", rank, f"must be from 0 to {num_ranks - 1}, or None to choose by load")


def check_drafts(drafts: Sequence[int] | None, vocab_size: int) -> list[int]:
    """A drafter's guesses up to the first that is no token: a wrong guess costs time, and no more."""
    good: list[int] = []
    for token in drafts or ():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            break
        good.append(token)
    return good


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(field: str, value: object, rule: str) -> RequestError:
    shown = ascii(value)
    return RequestError(field=field, value=value if len(shown) <= SHOWN else shown[:SHOWN] + "...", rule=rule)
