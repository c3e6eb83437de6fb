"""What a rank must know to reach rank 0: an address and the group's key; and the files that carry either.

The key is a secret. It travels over an inherited descriptor or in a file that only its owner may read: never on a
command line or in the environment, which others can look into. Knows files; does not know sockets (see `meeting`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_KEY_BYTES = 16
POLL_S = 0.02
LEFT_S = 3600.0
"""Ranks meet within minutes: an older invitation is of a run that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Where rank 0 is met, and the key that both ends prove to hold."""

    host: str
    port: int
    key: bytes

    def to_bytes(self) -> bytes:
        return json.dumps({"host": self.host, "port": self.port, "key": self.key.hex()}).encode()

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Invitation:
        found = json.loads(encoded)
        return cls(host=found["host"], port=found["port"], key=bytes.fromhex(found["key"]))


def read_key_file(path: Path) -> bytes:
    """The key in a file of the user's: any bytes, white space around them left out.

    Raises ValueError when others may read the file or when it is too short, OSError when it cannot be read.
    """
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(f"--key-file {path} may be read by others (mode {mode:04o}); chmod 600 {path}")
        secret = file.read().strip()
    if len(secret) < MIN_KEY_BYTES:
        raise ValueError(
            f"--key-file {path} holds {len(secret)} bytes; a key has at least {MIN_KEY_BYTES}, "
            f"e.g. head -c 32 /dev/urandom | base64 > {path}"
        )
    return hashlib.sha256(b"serried key file\0" + secret).digest()


def private_folder() -> Path:
    """A folder on this machine that only this user may look into. Raises ValueError if somebody else made it."""
    folder = Path(f"/tmp/serried-{os.getuid()}")  # not tempfile's: TMPDIR may differ from rank to rank
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{folder} is not a folder that is yours alone (mode 0700); remove it, or give --rendezvous and --key-file"
        )
    return folder


def invitation_path(folder: Path, run_id: str) -> Path:
    """Where the ranks of one run on this machine look; without `run_id`, ranks with one parent process are one run."""
    name = run_id or f"parent {os.getppid()} {_start_time(os.getppid())}"
    return folder / f"run-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def publish(invitation: Invitation, path: Path) -> None:
    """Put it where the others look, whole at once; what runs that were killed left there goes."""
    for left in path.parent.glob("run-*"):
        with contextlib.suppress(FileNotFoundError):  # another run may clear up at the same time
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(invitation.to_bytes())
    draft.replace(path)


def published(path: Path, *, timeout_s: float) -> Iterator[Invitation]:
    """What is found at `path`, each time that it is another, until the time is over.

    More than one may have to be tried: the first may be what a run that was killed left behind.
    """
    end = time.monotonic() + timeout_s
    last = b""
    while time.monotonic() < end:
        found = path.read_bytes() if path.exists() else b""
        if found and found != last:
            last = found
            yield Invitation.from_bytes(found)
        time.sleep(POLL_S)  # the other process says by the file alone that it is there


def _start_time(pid: int) -> str:
    """In clock ticks since boot; tells apart processes that had one pid after the other."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
