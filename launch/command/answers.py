"""What has arrived of each request, and the two ways of printing it in input order while more arrives.

An answer is complete when it has a finish reason. Requests end in any order; what is printed follows the order of the
input: the first unfinished one is printed as it grows, later ones wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from runtime import FinishReason, TokenEvent, TokenLogprob

from .prompts import Prompt
from .text import TextCodec, TextStream


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request's output so far."""

    prompt: Prompt
    prompt_tokens: Sequence[int]
    stream: TextStream | None
    """None when the model folder has no tokenizer: there is no text then."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    text: str = ""
    rank: int | None = None
    seed: int | None = None
    finish_reason: str | None = None

    def take(self, event: TokenEvent) -> None:
        """Add what a step produced."""
        self.rank, self.seed = event.rank, event.seed
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if self.stream is not None:
            self.text += self.stream.push(event.token_ids)
        if event.finish_reason is not None:
            self.finish_reason = str(event.finish_reason)
            if self.stream is not None:
                self.text += self.stream.finish()

    def fail(self) -> None:
        """Nothing more will come: an answer that is not complete ends here."""
        if self.finish_reason is None:
            self.rank = self.rank or 0
            self.finish_reason = str(FinishReason.ERROR)

    def record(self) -> dict[str, Any]:
        """The answer as one JSON object; log-probabilities only when they were asked for."""
        record: dict[str, Any] = {
            "id": self.prompt.id,
            "prompt_tokens": len(self.prompt_tokens),
            "token_ids": self.token_ids,
            "text": None if self.stream is None else self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
        }
        if self.prompt.params.logprobs is not None:
            record["logprobs"] = [_logprob(entry) for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            record["prompt_logprobs"] = [entry and _logprob(entry) for entry in self.prompt_logprobs]
        return record


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [{"token_id": token, "logprob": value} for token, value in entry.top.items()],
    }


class Printer(Protocol):
    """Prints whatever of the answers has become printable since the last call."""

    def advance(self) -> None: ...


class JsonPrinter:
    """One line a request. Letters beyond ASCII are spelled as they are if `out` can be trusted to have them all."""

    def __init__(self, answers: Sequence[Answer], out: TextIO) -> None:
        self._waiting = list(reversed(answers))
        self._out = out
        self._ascii = not (out.encoding or "utf-8").lower().startswith("utf")

    def advance(self) -> None:
        while self._waiting and self._waiting[-1].finish_reason is not None:
            print(json.dumps(self._waiting.pop().record(), ensure_ascii=self._ascii), file=self._out, flush=True)


class TextPrinter:
    """Readable text: a heading, then the prompt and its continuation as it grows."""

    def __init__(self, answers: Sequence[Answer], out: TextIO, *, codec: TextCodec | None) -> None:
        self._waiting = list(reversed(answers))
        self._out = out
        self._codec = codec
        self._printed: int | None = None

    def advance(self) -> None:
        while self._waiting:
            answer = self._waiting[-1]
            if answer.rank is None:
                return
            self._grow(answer)
            if answer.finish_reason is None:
                return
            self._write(f"\n[{len(answer.token_ids)} tokens, {answer.finish_reason}]\n\n")
            self._waiting.pop()
            self._printed = None

    def _grow(self, answer: Answer) -> None:
        shown = answer.text if self._codec else " ".join(map(str, answer.token_ids))
        if self._printed is None:
            self._write(f"=== {answer.prompt.id} (rank {answer.rank})\n{self._prompt_text(answer)}")
            self._printed = 0
        self._write(shown[self._printed :])
        self._printed = len(shown)

    def _prompt_text(self, answer: Answer) -> str:
        if answer.prompt.text is not None:
            return answer.prompt.text
        if self._codec is not None:
            return self._codec.decode(answer.prompt_tokens)
        return " ".join(map(str, answer.prompt_tokens)) + " > "

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
