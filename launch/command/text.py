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
CONTEXT = 6
"""Prompt tokens that settle how the first output token is spelled."""

MAX_CHARACTER_LEN = 4
"""Bytes of UTF-8, and so tokens."""

SHOWN = 60


class TextCodec:
    """One model's tokenizer: `encode` prompts, `decode` whole outputs, `stream` growing ones."""

    def __init__(self, tokenizer: Tokenizer, *, prefix: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        """`prefix` is put in front of every prompt, over and above what the tokenizer's post-processor adds."""
        self._tokenizer = tokenizer
        self._prefix = list(prefix)
        self._skip_special_tokens = skip_special_tokens

    def showing_special_tokens(self) -> TextCodec:
        """The same, but special tokens are text, too."""
        return TextCodec(self._tokenizer, prefix=self._prefix, skip_special_tokens=False)

    @classmethod
    def open(cls, folder: Path) -> TextCodec | None:
        """The codec of a model folder; None when it has no `tokenizer.json` (then only token ids can be exchanged).

        Raises ValueError naming the file that cannot be read, or that asks for a BOS which the vocabulary has not.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        content = path.read_bytes()  # the library reads only paths that are text
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for every fault in the file
            raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, prefix=_missing_bos(tokenizer, folder / "tokenizer_config.json"))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the folder wants around it."""
        return self._prefix + self._tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out by default; a character cut at the end shows as U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """A decoder for an output that grows; `prompt` settles how it opens: with a space, or amid a character."""
        return TextStream(self, prompt)


class TextStream:
    """Text of a growing output, piece by piece; the pieces joined are the text of the whole.

    A tokenizer decodes a token differently at the start of a text than inside it, so a piece is the difference
    between two decodes that begin at the same earlier token. Text that ends in U+FFFD may be half of a character and
    is held back until more tokens complete it:

        tokens   0 .. start .. shown .. end
                      |------------|          printed before
                      |-------------------|   decode now; what follows the first part is the new piece

    A prompt of token ids may end amid a character. If the output completes it, the whole character is its first piece.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._tokens, self._whole = _context(codec, prompt)
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain, possibly empty."""
        self._tokens.extend(token_ids)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        self._whole = self._shown
        return text

    def held_back(self) -> str:
        """Text that is not certain yet: it may still change when more tokens come."""
        return self._new_text()

    def mark(self) -> tuple[int, int, int, int]:
        """Where it is now, for `back_to`."""
        return len(self._tokens), self._start, self._shown, self._whole

    def back_to(self, mark: tuple[int, int, int, int]) -> None:
        """Forget what was pushed since `mark` was taken."""
        num_tokens, self._start, self._shown, self._whole = mark
        del self._tokens[num_tokens:]

    def finish(self) -> str:
        """What was held back; the output ends here, so half a character is shown as U+FFFD."""
        text = self._new_text()
        self._start = self._shown = self._whole = len(self._tokens)
        return text

    def _new_text(self) -> str:
        text = self._codec.decode(self._tokens[self._start :])
        before = self._codec.decode(self._tokens[self._start : self._shown])
        if self._whole < self._shown and not text.startswith(before):
            before = self._codec.decode(self._tokens[self._start : self._whole])
        return text[len(before) :]


def _context(codec: TextCodec, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The last tokens of a prompt, beginning with a character, and how many of them there are to the end of one."""
    for num_begun in range(MAX_CHARACTER_LEN):
        for size in range(CONTEXT, CONTEXT + MAX_CHARACTER_LEN):
            tokens = list(prompt[-size:])
            whole = max(0, len(tokens) - num_begun)
            text = codec.decode(tokens[:whole])
            if not text.startswith(UNFINISHED) and not text.endswith(UNFINISHED):
                return tokens, whole
    tokens = list(prompt[-CONTEXT:])  # U+FFFD it really is, or never was text
    return tokens, len(tokens)


def _missing_bos(tokenizer: Tokenizer, path: Path) -> list[int]:
    """The BOS that `add_bos_token` asks for and the post-processor does not add by itself; empty otherwise."""
    settings = _settings(path) if path.is_file() else {}
    wanted, bos = settings.get("add_bos_token"), settings.get("bos_token")
    if wanted not in (None, False, True):
        raise ValueError(f"{path}: add_bos_token must be true or false")
    if not wanted:
        return []
    content = bos.get("content") if isinstance(bos, dict) else bos
    if not isinstance(content, str):
        raise ValueError(f'{path}: add_bos_token is true, but bos_token is not a text, e.g. "<s>"')
    token = tokenizer.get_vocab(with_added_tokens=True).get(content)
    if token is None:
        shown = repr(content[:SHOWN])
        raise ValueError(f"{path}: add_bos_token is true, but bos_token ({shown}) is not in the vocabulary")
    return [] if token in tokenizer.encode("").ids else [token]


def _settings(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises ValueError naming it."""
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # the first also for what is no UTF-8, or a number without end
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f'{path} must hold an object, e.g. {{"add_bos_token": true, "bos_token": "<s>"}}')
    return settings
