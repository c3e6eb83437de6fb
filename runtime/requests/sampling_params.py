"""What a request may ask of the sampler: one frozen value, checked once, at the door.

Every field is checked for type and range when the value is built, so nothing behind the door checks again. The names
and their meaning are vLLM's. What it does not know: the vocabulary (`check_vocab` is told its size), the tokenizer, the
length limit of the engine, and which tokens end a text (the model's configuration says that).

Types are strict: a bool is not a number, `5.0` is not an integer, NaN and the infinities are refused. Numbers of NumPy
(`numpy.int64(3)`, `numpy.float32(0.5)`) are accepted and stored as Python's own `int` and `float`.
"""

import difflib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Self, TypeGuard

from ep.errors import RequestError

MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. `RequestError` names the field, the value, the rule and a legal value.

    The sampler works in the order: logit_bias, repetition_penalty, presence_penalty and frequency_penalty, min_tokens,
    temperature, min_p, top_k, top_p. A field at its neutral value costs nothing.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (ties: the lowest id). Any finite number >= 0."""

    top_k: int = 0
    """Keep this many of the most likely tokens; 0 or -1 keeps all. More than the vocabulary also keeps all."""

    top_p: float = 1.0
    """Keep the fewest most likely tokens that together hold this share of the probability; 0 < top_p <= 1."""

    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one; 0 <= min_p <= 1."""

    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, others multiplied; from 0.01 to 100."""

    presence_penalty: float = 0.0
    """Taken off the logit of every token that the output holds; from -2 to 2."""

    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time that the output holds it; from -2 to 2."""

    logit_bias: Mapping[int, float] | None = None
    """Token id -> number from -100 to 100, added to its logit; at most 1024 entries. Kept as a copy in id order."""

    seed: int | None = None
    """From 0 to 2**64 - 1. Same seed, same tokens, whatever else runs (in 16-bit formats up to rounding); None: the
    engine draws one and reports it."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's own; at most 128. The token itself stays in the output."""

    ignore_eos: bool = False
    """Go on past the model's own end-of-text tokens."""

    min_tokens: int = 0
    """No token that ends the output is sampled before it has this many tokens; at most max_tokens."""

    max_tokens: int | None = 16
    """The output has at most this many tokens; None: as many as the model's length limit leaves."""

    logprobs: int | None = None
    """Report the log-probability of each sampled token and of this many most likely ones (0 to 20); None: none."""

    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first; the whole prompt is computed then, cached or not."""

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused(
                "min_tokens", self.min_tokens, f"must be at most max_tokens ({self.max_tokens})", self.max_tokens
            )

    def _checked(self) -> dict[str, Any]:
        """The fields in their own Python types, each within its range."""
        return {
            "temperature": _number("temperature", self.temperature, 0.0, math.inf),
            "top_k": _integer("top_k", self.top_k, -1, MAX_INT32),
            "top_p": _top_p(self.top_p),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": None if self.logit_bias is None else _logit_bias(self.logit_bias),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, MAX_SEED),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, MAX_INT32),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1, MAX_INT32),
            "logprobs": _logprobs("logprobs", self.logprobs),
            "prompt_logprobs": _logprobs("prompt_logprobs", self.prompt_logprobs),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From a JSON object. Unknown names are refused; keys of `logit_bias` may be decimal strings, as in JSON."""
        if not isinstance(values, Mapping):
            raise _refused(
                "sampling parameters", values, "must be an object of fields and values", {"temperature": 0.0}
            )
        known = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise RequestError(field=_shown_name(name), value=_shown(value), rule=_unknown_field_rule(name, known))
        values = dict(values)
        if isinstance(values.get("logit_bias"), Mapping):
            values["logit_bias"] = _integer_keys(values["logit_bias"])
        return cls(**values)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse stop tokens and biased tokens that are not among ids 0 .. vocab_size - 1."""
        rule = f"token ids must be below the vocabulary size ({vocab_size})"
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise _refused(field, token_id, rule, vocab_size - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether every token is that of the largest logit as it stands, and nothing else is wanted of it."""
        return (
            self.is_greedy
            and not self.has_penalties
            and not self.logit_bias
            and not self.min_tokens
            and self.logprobs is None
        )

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _refused(field: str, value: object, rule: str, allowed: object) -> RequestError:
    return RequestError(field=field, value=_shown(value), rule=f"{rule}, for example {allowed!r}")


def _shown(value: object) -> object:
    """The value as an error may carry it: short, whatever a client sent."""
    if isinstance(value, int):
        return value if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return value if len(value) <= 80 else f"{value[:77]}..."
    return value if value is None or isinstance(value, float) else f"a {type(value).__name__}"


def _shown_name(name: object) -> str:
    """A field name that a client made up, in one line: what does not print is escaped."""
    text = str(_shown(name))
    return text if text.isprintable() else ascii(text)


NOT_BUILT = {
    "stop": "stop strings are not built; stop_token_ids ends a text at a token",
    "n": "several answers to one prompt are not built; ask as often, each time with another seed",
    "messages": "chat is not built; a prompt is text or token ids",
}


def _unknown_field_rule(name: object, known: Sequence[str]) -> str:
    if name in NOT_BUILT:
        return NOT_BUILT[str(name)]
    close = difflib.get_close_matches(str(name)[:80].lower(), known, n=1)
    if close:
        return f"is not a sampling field, did you mean {close[0]!r}?"
    return f"is not a sampling field, those are {', '.join(known)}"


def _number(field: str, value: object, low: float, high: float) -> float:
    rule = (
        f"must be a number from {low:g} to {high:g}" if math.isfinite(high) else f"must be a finite number >= {low:g}"
    )
    number = _as_float(value)
    if number is None:
        raise _refused(field, value, rule, _neighbour(1.0, low, high))
    if not (math.isfinite(number) and low <= number <= high):
        raise _refused(field, value, rule, _neighbour(number, low, high))
    return number


def _as_float(value: object) -> float | None:
    """None for what is no number; an integer past every float is infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def _neighbour(number: float, low: float, high: float) -> float:
    """The nearest legal number; 1.0 stands for what is infinite."""
    nearest = low if math.isnan(number) else min(max(number, low), high)
    return nearest if math.isfinite(nearest) else max(low, 1.0)


def _top_p(value: object) -> float:
    """Temperature 0 takes the most likely token; a share of 0 would be a second way to say it, and is refused."""
    number = _as_float(value)
    if number is None or not 0.0 < number <= 1.0:
        raise _refused("top_p", value, "must be a number above 0 and at most 1", 1.0)
    return number


def _integer(field: str, value: object, low: int, high: int) -> int:
    rule = f"must be an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refused(field, value, rule, min(max(0, low), high))
    number = int(value)
    if not low <= number <= high:
        raise _refused(field, value, rule, min(max(number, low), high))
    return number


def _logprobs(field: str, value: object) -> int | None:
    return None if value is None else _integer(field, value, 0, MAX_TOP_LOGPROBS)


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(field, value, "must be true or false", False)
    return value


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | Set):
        raise _refused("stop_token_ids", value, "must be a list of token ids", [1, 2])
    if len(value) > MAX_STOP_TOKEN_IDS:
        rule = f"must have at most {MAX_STOP_TOKEN_IDS} entries"
        raise _refused("stop_token_ids", f"{len(value)} entries", rule, f"the first {MAX_STOP_TOKEN_IDS}")
    ids = tuple(_integer("stop_token_ids", token_id, 0, MAX_INT32) for token_id in value)
    return tuple(sorted(ids)) if isinstance(value, Set) else ids


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refused("logit_bias", value, "must map token ids to numbers", {7: -100.0})
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        rule = f"must have at most {MAX_LOGIT_BIAS_ENTRIES} entries"
        raise _refused("logit_bias", f"{len(value)} entries", rule, f"the first {MAX_LOGIT_BIAS_ENTRIES}")
    entries = {_integer("logit_bias", token_id, 0, MAX_INT32): bias for token_id, bias in value.items()}
    return {token_id: _number("logit_bias", entries[token_id], -100.0, 100.0) for token_id in sorted(entries)}


def _is_decimal(key: object) -> TypeGuard[str]:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10


def _integer_keys(bias: Mapping[Any, Any]) -> dict[Any, Any]:
    """JSON has only strings as keys: "17" is token 17. What is no number stays and is refused later by its type."""
    keys = {key: int(key) if _is_decimal(key) else key for key in bias}
    if len(set(keys.values())) < len(keys):
        raise _refused(
            "logit_bias", f"{len(keys)} entries", "must name a token once, not as both '7' and '07'", {7: -100.0}
        )
    return {keys[key]: value for key, value in bias.items()}
