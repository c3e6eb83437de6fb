"""Text to token ids and back, with the `tokenizers` library and the model folder's own `tokenizer.json`.

Knows when a beginning-of-text token belongs in front (only where the folder says so), and how to print text while it
is still growing without ever showing half a character. Does not know requests or sampling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """One model's tokenizer: `encode` prompts, `decode` whole outputs, `stream` growing ones."""

    def __init__(self, tokenizer: Tokenizer, *, prefix: Sequence[int] = ()) -> None:
        """`prefix` is put in front of every prompt, over and above what the tokenizer's post-processor adds."""
        self._tokenizer = tokenizer
        self._prefix = list(prefix)

    @classmethod
    def open(cls, folder: Path) -> TextCodec | None:
        """The codec of a model folder; None when it has no `tokenizer.json` (then only token ids can be exchanged).

        Raises ValueError naming the file when it cannot be read, or when it asks for a BOS that it does not have.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault in the file
            raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, prefix=_missing_bos(tokenizer, folder / "tokenizer_config.json"))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the folder wants around it."""
        return self._prefix + self._tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out; a character that is cut at the end shows as U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """A decoder for an output that grows; `prompt` only settles whether it opens with a space."""
        return TextStream(self, prompt)


class TextStream:
    """Text of a growing output, piece by piece; the pieces joined are the text of the whole.

    A tokenizer decodes a token differently at the start of a text than inside it, so a piece is the difference
    between two decodes that begin at the same earlier token. Text that ends in U+FFFD may be half of a character and
    is held back until more tokens complete it:

        tokens   0 .. start .. shown .. end
                      |------------|          printed before
                      |-------------------|   decode now; what follows the first part is the new piece
    """

    CONTEXT = 6  # prompt tokens that settle how the first output token is spelled

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._tokens = list(prompt[-self.CONTEXT :])
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain, possibly empty."""
        self._tokens.extend(token_ids)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """What was held back; the output ends here, so half a character is shown as U+FFFD."""
        text = self._new_text()
        self._start = self._shown = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = self._codec.decode(self._tokens[self._start : self._shown])
        return self._codec.decode(self._tokens[self._start :])[len(before) :]


def _missing_bos(tokenizer: Tokenizer, path: Path) -> list[int]:
    """The BOS that `add_bos_token` asks for and the post-processor does not add by itself; empty otherwise."""
    settings: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if not settings.get("add_bos_token"):
        return []
    bos = settings.get("bos_token")
    content = bos.get("content") if isinstance(bos, dict) else bos
    token = tokenizer.token_to_id(content) if content else None
    if token is None:
        raise ValueError(f"{path}: add_bos_token is true, but bos_token ({content!r}) is not in the vocabulary")
    return [] if token in tokenizer.encode("").ids else [token]
