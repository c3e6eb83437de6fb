"""Which files of a folder hold a checkpoint, and whether they tell one story: every tensor in one file, none unnamed.

    no index    every *.safetensors counts, and a name in two of them is refused
    one index   it names every *.safetensors there is, and for every tensor in them the file they are in

A shard is held against the index when its header is read anyway, so that a rank opens no file that it has no use for;
the header of a file that the index does not name is read at once, to say what is in it. Knows names and files; does not
know which tensors a model has (see `checkpoint_names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ep import CheckpointError

from ..model.config_fields import shown
from .checkpoint_names import is_skipped
from .safetensors_file import tensor_names


def find_index(folder: Path) -> Path | None:
    """The index of a folder's shards, None when it has none. CheckpointError when it has several."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        names = " and ".join(index.name for index in indices)
        raise CheckpointError(tensor=None, file=folder, expected="at most one index", found=f"{names}; one must go")
    return indices[0] if indices else None


def join_files(names_of: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Every tensor and the file it is in, from the names in each file. CheckpointError for one that is in two."""
    file_of: dict[str, Path] = {}
    for file, names in names_of.items():
        for name in names:
            if name in file_of and not is_skipped(name):
                raise CheckpointError(
                    tensor=name, file=file, expected="each tensor in one file", found=f"a copy in {file_of[name]} too"
                )
            file_of[name] = file
    return file_of


def place_files(weight_map: Mapping[str, object], index: Path) -> dict[str, Path]:
    """Every tensor and the file that an index names for it, in the index's folder.

    CheckpointError for what is no file name, and for tensors in a file of the folder that the index does not name.
    """
    file_of: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(
                tensor=name, file=index, expected="the name of a file in its folder", found=_plain(file)
            )
        file_of[name] = index.parent / file
    for file in sorted(set(index.parent.glob("*.safetensors")) - set(file_of.values())):
        _check_idle(file, index)
    return file_of


def check_shard(file: Path, names: Iterable[str], file_of: Mapping[str, Path]) -> None:
    """Hold the names in one file against where all tensors are. CheckpointError for one that is placed elsewhere."""
    for name in names:
        place = file_of.get(name)
        if place == file or is_skipped(name):
            continue
        raise CheckpointError(
            tensor=name,
            file=file,
            expected="the tensors that the index places in this file",
            found="one that it leaves out" if place is None else f"a copy of the one in {place}",
        )


def _check_idle(file: Path, index: Path) -> None:
    """A file that the index does not name may hold nothing that a model could want."""
    for name in tensor_names(file):
        if not is_skipped(name):
            raise CheckpointError(
                tensor=name,
                file=file,
                expected=f"the files that {index.name} names",
                found="one that it does not; one of the two must go",
            )


def _plain(file: object) -> str:
    """A name as it stands, anything else as an error says it."""
    return shown(file)[1:-1] if isinstance(file, str) and file else shown(file)
