"""`serried shard` as a person uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.command.shard import ABOUT, ShardFlags, run
from launch.commands import parse_flags
from launch.groups.refusal import Refusal


def flags(*words: str) -> ShardFlags:
    return parse_flags(ShardFlags, words, name="shard", about=ABOUT)


def test_a_model_is_cut_and_checked(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny-4"
    assert run(flags(tiny, "--ranks", "4", "--out", str(folder))) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "wrote 5 files, 24.13 MiB, in" in said.err
    assert said.err.strip().endswith(str(folder))
    assert run(flags(str(folder), "--check")) == 0
    assert "checked 5 files, 24.1" in capsys.readouterr().err


def test_a_folder_that_differs_fails_the_check(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny-2"
    run(flags(tiny, "--ranks", "2", "--out", str(folder)))
    with (folder / "model-shared.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"?")
    capsys.readouterr()
    assert run(flags(str(folder), "--check")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"serried: {folder}/model-shared.safetensors: expected")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "out and ranks are needed to write shards, e.g. --ranks 8 --out MODEL-8; or give --check"),
        (("--ranks", "4"), "out and ranks are needed"),
        (("--out", "x"), "out and ranks are needed"),
        (("--ranks", "0", "--out", "x"), "ranks is 0; it must be at least 1, e.g. 8"),
        (("--check", "--ranks", "4"), "check is given with out or ranks; it takes a folder and nothing else"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        flags(tiny, *words)


def test_what_cannot_be_cut_is_refused_in_a_line(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="num_ranks 33 must be from 1 to 32"):
        run(flags(tiny, "--ranks", "33", "--out", str(tmp_path / "x")))
    with pytest.raises(Refusal, match="exists; shards are written to a new folder"):
        run(flags(tiny, "--ranks", "2", "--out", str(tmp_path)))
    with pytest.raises(Refusal, match="was not cut by `serried shard`"):
        run(flags(tiny, "--check"))
    with pytest.raises(Refusal, match="is not a folder or file"):
        run(flags("no-such-model", "--ranks", "2", "--out", str(tmp_path / "x")))
