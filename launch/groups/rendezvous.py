"""How the ranks of one run find each other and agree on a secret, for every way of starting them.

    own launcher             a port that the system picks; port and a random key go over an inherited descriptor
    one node, a launcher     the same, in a file of mode 0600 that rank 0 leaves in this user's own folder
    several nodes            --rendezvous HOST:PORT and --key-file, on every node the same

What launchers themselves hand out (torchrun's run id, Slurm's job id) tells runs apart, but is no secret and never the
key. Without --key-file, whoever may read this user's files on the node may join: nobody else. Frames are authenticated,
not encrypted. Every socket is bound to --interface alone. Knows Worlds and files; the meeting itself is in `meeting`.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ep.errors import PeerFailed
from runtime.control.door import host_of, open_listener
from runtime.control.frames import LinkClosed, WrongKey

from .fields import Fields
from .invitation import Invitation, invitation_path, private_folder, publish, published, read_key_file
from .meeting import Meeting, host_meeting, join_meeting
from .world import World

RETRY_S = 0.2
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """How ranks that are processes find each other."""

    interface: str = "lo"
    """Network interface that ranks listen on, or an address of it; nothing listens anywhere else."""

    rendezvous: str | None = None
    """HOST:PORT where rank 0 is met, or :PORT where the launcher says the host; needed with several nodes."""

    key_file: Path | None = None
    """File with the group's secret, readable by you alone; needed with several nodes, else one is made up."""

    start_timeout: float = 120.0
    """Seconds that ranks wait for each other while they start."""

    def __post_init__(self) -> None:
        if not 0.0 < self.start_timeout <= MAX_TIMEOUT_S:
            raise ValueError(
                f"start_timeout is {self.start_timeout}; it must be above 0 and at most {MAX_TIMEOUT_S:g}, e.g. 120"
            )


class Gate:
    """Rank 0's end before the meeting: a socket that listens, and the invitation to it."""

    def __init__(self, listener: socket.socket, key: bytes, *, path: Path | None) -> None:
        host, port = listener.getsockname()[:2]
        self.listener = listener
        self.invitation = Invitation(host=host, port=port, key=key)
        self._path = path
        if path is not None:
            publish(self.invitation, path)

    def close(self) -> None:
        """Nobody is invited any more. Closing twice is the same as once."""
        self.listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gate(world: World, config: RendezvousConfig, *, by_file: bool) -> Gate:
    """Bind rank 0's socket. `by_file`: the others are told by a file; else whoever starts them hands the invitation on.

    Raises ValueError when the flags do not do for this World, OSError when a file or the interface fails.
    """
    _check_flags(world, config)
    address = _given_address(world, config)
    if address is None:
        key = read_key_file(config.key_file) if config.key_file is not None else secrets.token_bytes(32)
        path = invitation_path(private_folder(), world.run_id) if by_file else None
        return Gate(open_listener(config.interface), key, path=path)
    _check_reachable(address[0], config.interface)
    assert config.key_file is not None, "checked above"
    try:
        listener = open_listener(config.interface, port=address[1])
    except OSError as error:
        raise ValueError(
            f"--rendezvous {config.rendezvous}: cannot listen on port {address[1]} of {config.interface} "
            f"({error.strerror}); give another port"
        ) from error
    return Gate(listener, read_key_file(config.key_file), path=None)


def meet(
    world: World,
    config: RendezvousConfig,
    *,
    fields: Fields,
    endpoints: Sequence[str],
    gate: Gate | None = None,
    invitation: Invitation | None = None,
    check: Callable[[], None] | None = None,
) -> Meeting:
    """Bring all ranks of `world` together; the same call on every rank, with equal `endpoints`.

    gate         on rank 0 of our own launcher, which has opened it before it started the others
    invitation   on the other ranks of our own launcher
    check        on rank 0: raises when a rank that is waited for has ended

    Raises RanksDiffer naming ranks, field and values; PeerFailed naming a rank that is missing or gone; LinkError when
    this rank does not belong to the group that it found; ValueError for flags that do not do for this World.
    """
    if world.is_primary:
        with gate or open_gate(world, config, by_file=world.size > 1) as gate:
            return host_meeting(
                gate.listener,
                size=world.size,
                key=gate.invitation.key,
                fields=fields,
                endpoints=endpoints,
                interface=config.interface,
                timeout_s=config.start_timeout,
                check=check,
            )
    return _join(world, config, fields, [invitation] if invitation is not None else _invitations(world, config))


def _join(
    world: World, config: RendezvousConfig, fields: Fields, invitations: Sequence[Invitation] | Iterator[Invitation]
) -> Meeting:
    """Try one invitation after the other: rank 0 may not be there yet, or the first one is an old one."""
    cause = "it left no invitation"
    for found in invitations:
        try:
            return join_meeting(
                (found.host, found.port),
                rank=world.rank,
                size=world.size,
                key=found.key,
                fields=fields,
                timeout_s=config.start_timeout,
            )
        except (LinkClosed, WrongKey) as error:
            if isinstance(error, WrongKey) and config.rendezvous is not None:
                raise
            cause = str(error)
    raise PeerFailed(0, f"was not met ({cause}); if it says something itself, that is the cause", rank=world.rank)


def _invitations(world: World, config: RendezvousConfig) -> Iterator[Invitation]:
    """Where rank 0 may be, until the time is over."""
    _check_flags(world, config)
    address = _given_address(world, config)
    key = read_key_file(config.key_file) if config.key_file is not None else None
    if address is None:
        path = invitation_path(private_folder(), world.run_id)
        for found in published(path, timeout_s=config.start_timeout):
            yield Invitation(host=found.host, port=found.port, key=key or found.key)
        return
    assert key is not None, "checked above"
    end = time.monotonic() + config.start_timeout
    while time.monotonic() < end:
        yield Invitation(host=address[0], port=address[1], key=key)
        time.sleep(RETRY_S)  # nobody answers: rank 0 has not begun to listen


def _check_flags(world: World, config: RendezvousConfig) -> None:
    if world.num_nodes == 1 and config.rendezvous is None:
        return
    missing = [
        flag for flag, value in (("--rendezvous", config.rendezvous), ("--key-file", config.key_file)) if not value
    ]
    if missing:
        why = f"{world.num_nodes} nodes" if world.num_nodes > 1 else "--rendezvous"
        raise ValueError(
            f"{why}: {' and '.join(missing)} must be given, the same on every node, "
            "e.g. --rendezvous node0:29600 --key-file ~/.serried-key"
        )


def _given_address(world: World, config: RendezvousConfig) -> tuple[str, int] | None:
    """(host, port) of --rendezvous."""
    if config.rendezvous is None:
        return None
    host, colon, port = config.rendezvous.rpartition(":")
    host = host.strip("[]") or world.master_host
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        known = "" if world.master_host else f"; {world.source} does not say where rank 0 runs, so HOST is needed"
        raise ValueError(f"--rendezvous {config.rendezvous} must be HOST:PORT or :PORT, e.g. node0:29600{known}")
    return host, int(port)


def _check_reachable(host: str, interface: str) -> None:
    """Ranks that call `host` must not find that rank 0 listens on loopback only."""
    if _is_loopback(host_of(interface)) and not _is_loopback(socket.gethostbyname(host)):
        raise ValueError(
            f"--interface is {interface}, where nobody from another machine is heard, but rank 0 is to be met at "
            f"{host}; give the interface of that address, e.g. --interface eth0"
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
