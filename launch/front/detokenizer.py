"""Stop strings: at which token of a growing output one of them is complete, whatever tokens it is spelled with.

A stop string may begin in one token and end in another, or lie amid one; a character may be cut in two by the border
of a step. Text is made only as far as the search needs it; what leaves the server are token ids, the one that completes
the stop string included, as with stop_token_ids. So it is the same here whether the string is to stay in the text;
whoever makes the text cuts it.

Knows the tokenizer by `text`; does not know requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..command.text import UNFINISHED, TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """`stop` was complete with token `num_tokens` - 1 of those just pushed."""

    stop: str
    num_tokens: int


class StopWatch:
    """Looks for stop strings in one output.

        text of the output    . . . . . . . . . . S T | O P . . .
                              seen before ... tail ---  pushed

    Of the text before, only as much is kept as could be the beginning of the longest stop string.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stop: Sequence[str], *, min_tokens: int = 0) -> None:
        """`min_tokens` of the output are never searched, nor can a stop string begin in their text."""
        assert stop, "there is nothing to look for"
        self._stream = codec.stream(prompt)
        self._stops = tuple(stop)
        self._tail = ""
        self._keep = max(map(len, stop)) - 1
        self._unsearched = min_tokens

    def push(self, token_ids: Sequence[int]) -> Stopped | None:
        """Take the next tokens; says whether they complete a stop string, and the first of them that does."""
        skipped = min(self._unsearched, len(token_ids))
        if skipped:
            self._unsearched -= skipped
            self._stream.push(token_ids[:skipped])
        searched = token_ids[skipped:]
        if not searched:
            return None
        mark, tail = self._stream.mark(), self._tail
        if (last := self._find(searched)) is None:
            return None
        # Some token of these completes it: which one is found by taking them one by one.
        self._stream.back_to(mark)
        self._tail = tail
        for place, token in enumerate(searched):
            if (stop := self._find([token])) is not None:
                return Stopped(stop=stop, num_tokens=skipped + place + 1)
        return Stopped(stop=last, num_tokens=len(token_ids))  # a tokenizer that spells one by one in another way

    def _find(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that comes first in what the text now is, of those that start together the longest."""
        self._tail += self._stream.push(token_ids)
        text = self._tail + self._stream.held_back().rstrip(UNFINISHED)
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        self._tail = self._tail[max(0, len(self._tail) - self._keep) :] if self._keep else ""
        return min(found)[2] if found else None
