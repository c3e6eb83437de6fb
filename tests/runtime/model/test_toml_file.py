"""Whatever a file holds is a table, or refused in words that begin with its name."""

import pytest

from runtime.model.toml_file import read_toml


def test_a_table_is_read(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[part]\nnumber = 3\n")
    assert read_toml(file) == {"part": {"number": 3}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a =", "at end of document"),
        (b"\xff", "utf-8"),
        (b"a = " + b"9" * 5000, "digits"),
        (b"a = " + b"[" * 9999, "deep"),
    ],
)
def test_what_is_no_table_is_refused_by_the_files_name(tmp_path, content, words):
    file = tmp_path / "a.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.toml is not valid TOML: .*{words}"):
        read_toml(file)
