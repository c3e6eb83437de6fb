"""The files of a model's tokenizer as one zip, for a gateway on a host that has not the model's folder.

The same files give the same bytes, so that their hash names them. Only files of known names are packed, never what
else lies in the folder. Knows paths; does not read what is in them.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

CHUNK_BYTES = 512 * 1024
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold: the files' own would change the hash."""

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""One of these must be there."""


def zip_tokenizer(folder: Path) -> bytes | None:
    """The zip; None for a folder without a tokenizer."""
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if not any(path.name in TOKENIZERS for path in found):
        return None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            entry = zipfile.ZipInfo(path.name, date_time=LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return packed.getvalue()


def tokenizer_chunks(packed: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The zip in messages; the last carries its SHA-256, in hex."""
    last = max(0, len(packed) - 1) // CHUNK_BYTES
    for number in range(last + 1):
        piece = packed[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        digest = hashlib.sha256(packed).hexdigest() if number == last else ""
        yield common_pb2.GetTokenizerChunk(data=piece, sha256=digest)
