"""What marks a folder as cut by `serried shard`: a few fields beside the index of its files, and one in each file.

    model.safetensors.index.json    metadata.serried: format, set, slot_experts, and bytes and sha256 of every file
    every .safetensors file         metadata "serried.set": the same random name, so that two folders cannot be mixed

Knows these fields only; the tensors keep their published names, so that every other reader finds them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ep import CheckpointError

from .safetensors_file import Header

FORMAT = 1
KEY = "serried"
SET_KEY = "serried.set"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """A folder of shards: for how many ranks, which experts each holds, and its files."""

    set: str
    slot_experts: tuple[tuple[int, ...], ...]
    """Experts of each rank in slot order, -1 for an empty slot."""
    files: Mapping[str, ShardFile]

    @classmethod
    def from_index(cls, metadata: Mapping[str, Any]) -> Self | None:
        """From the metadata of an index; None for a folder that somebody else cut. Raises ValueError or KeyError."""
        fields = metadata.get(KEY)
        if fields is None:
            return None
        if fields["format"] != FORMAT:
            raise ValueError(f"shards are of format {fields['format']}, this version reads {FORMAT}; cut them anew")
        for name in fields["files"]:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not the name of a file in its folder")
        return cls(
            set=str(fields["set"]),
            slot_experts=tuple(tuple(int(expert) for expert in rank) for rank in fields["slot_experts"]),
            files={
                str(name): ShardFile(bytes=int(file["bytes"]), sha256=str(file["sha256"]))
                for name, file in fields["files"].items()
            },
        )

    def to_index(self) -> dict[str, Any]:
        """The inverse of `from_index`."""
        files = {name: asdict(file) for name, file in self.files.items()}
        return {KEY: {"format": FORMAT, "set": self.set, "slot_experts": self.slot_experts, "files": files}}

    def check(self, file: Path, header: Header) -> None:
        """CheckpointError unless the file is of this set and as long as it was written."""
        known = self.files.get(file.name)
        if known is None:
            raise CheckpointError(
                tensor=None, file=file, expected="a file that the index gives the length of", found="one it does not"
            )
        found = header.metadata.get(SET_KEY)
        if found != self.set:
            raise CheckpointError(
                tensor=None, file=file, expected=f"a file of the set {self.set}", found=f"one of the set {found}"
            )
        if header.file_bytes != known.bytes:
            raise CheckpointError(
                tensor=None, file=file, expected=f"{known.bytes} bytes, as written", found=f"{header.file_bytes} bytes"
            )

    def describe(self) -> str:
        """A line for the user."""
        num_ranks = len(self.slot_experts)
        return f"weights are cut for {num_ranks} rank{'s' if num_ranks > 1 else ''}"
