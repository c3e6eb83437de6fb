"""Values of any length over a link of fixed, sealed frames. Knows JSON and links; does not know what is said."""

from __future__ import annotations

import json
from typing import Any

from runtime.control.frames import Link, WrongSize
from runtime.control.handshake import LinkKind, Terms

FRAME_BYTES = 1024
MAX_MESSAGE = 1 << 18


def meeting_terms(size: int) -> Terms:
    """Of the links of a meeting of `size` ranks."""
    return Terms(kind=LinkKind.MEETING, size=size, up_bytes=FRAME_BYTES, down_bytes=FRAME_BYTES)


class Mail:
    """One end: | length u32 | JSON | zeros up to a whole frame |"""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._found = b""

    def send(self, value: Any) -> None:
        text = json.dumps(value).encode()
        assert len(text) <= MAX_MESSAGE, len(text)
        framed = len(text).to_bytes(4, "little") + text
        for begin in range(0, len(framed), FRAME_BYTES):
            self.link.send(framed[begin : begin + FRAME_BYTES].ljust(FRAME_BYTES, b"\0"))

    def ready(self) -> list[Any]:
        """The one value that is here in full, if any; never waits. Raises LinkError."""
        self._found += b"".join(self.link.receive_ready())
        length = int.from_bytes(self._found[:4], "little")
        if length > MAX_MESSAGE:
            raise WrongSize(f"rank {self.link.peer} says that {length} bytes follow", peer=self.link.peer)
        end = 4 + length
        if not self._found or len(self._found) < end:
            return []
        text, self._found = self._found[4:end], self._found[end + -end % FRAME_BYTES :]
        return [json.loads(text)]
