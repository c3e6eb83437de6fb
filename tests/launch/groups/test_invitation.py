"""Keys and addresses in files that only their owner reads."""

import os
import stat

import pytest

from launch.groups.invitation import Invitation, invitation_path, private_folder, publish, published, read_key_file

ONE = Invitation(host="127.0.0.1", port=4711, key=b"\0one key of bytes\xff")
TWO = Invitation(host="127.0.0.1", port=4712, key=b"another")


@pytest.fixture
def key_file(tmp_path):
    """key_file(content, mode) -> its path."""

    def write(content: bytes, mode: int = 0o600):
        path = tmp_path / "key"
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return write


def test_an_invitation_survives_its_way():
    assert Invitation.from_bytes(ONE.to_bytes()) == ONE


def test_a_key_file_gives_the_same_key_whatever_space_is_around_it(key_file):
    key = read_key_file(key_file(b"0123456789abcdef"))
    assert len(key) == 32
    assert read_key_file(key_file(b" 0123456789abcdef\n")) == key
    assert read_key_file(key_file(b"0123456789abcdeF")) != key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_may_touch_is_refused(key_file, mode):
    with pytest.raises(ValueError, match=rf"may be read by others \(mode {mode:04o}\); chmod 600"):
        read_key_file(key_file(b"0123456789abcdef", mode))


def test_a_short_key_is_refused(key_file):
    with pytest.raises(ValueError, match="holds 15 bytes; a key has at least 16"):
        read_key_file(key_file(b"0123456789abcde"))


def test_what_is_published_is_for_its_owner_alone_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "run"
    publish(ONE, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["run"]
    assert next(published(path, timeout_s=1.0)) == ONE


def test_what_killed_runs_left_is_cleared_up_and_what_is_fresh_stays(tmp_path):
    invitation = Invitation(host="127.0.0.1", port=1, key=b"k" * 32)
    for name in ("run-old", "run-fresh", "other"):
        publish(invitation, tmp_path / name)
    for name in ("run-old", "other"):
        os.utime(tmp_path / name, (0, 0))
    publish(invitation, tmp_path / "run-new")
    assert {path.name for path in tmp_path.iterdir()} == {"run-fresh", "run-new", "other"}


def test_an_old_invitation_is_followed_by_the_new_one(tmp_path):
    path = tmp_path / "run"
    publish(ONE, path)
    found = published(path, timeout_s=5.0)
    assert next(found) == ONE
    publish(TWO, path)
    assert next(found) == TWO


def test_without_an_invitation_the_wait_ends(tmp_path):
    assert list(published(tmp_path / "run", timeout_s=0.1)) == []


def test_runs_are_told_apart_by_their_name_or_their_parent(tmp_path):
    assert invitation_path(tmp_path, "77.0") != invitation_path(tmp_path, "77.1")
    assert invitation_path(tmp_path, "") == invitation_path(tmp_path, "")


def test_the_folder_for_invitations_is_private():
    found = private_folder().stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.getuid(), 0o700)
