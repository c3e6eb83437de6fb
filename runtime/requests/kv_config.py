"""How latents travel between this engine and others, and to memory beside the cache: what a user may set.

The docstrings under the fields are the command line's help. Knows names, defaults and ranges; imports no tensor
library, so that a front door without a model checks requests by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .admission import at_least

KvRole = Literal["prefill", "decode", "both"]
STORES = ("host", "file")
"""Keep pages by what they hold."""
PEERS = ("nixl", "tcp")
"""Fetch the pages of one request from the engine that computed them."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """Which connectors a rank has, and how far they are trusted; equal on every rank."""

    kv_connector: str = ""
    """Where latents go to and come from besides the cache: nixl, tcp, file, host, or several with commas between them;
    empty: nowhere."""

    kv_role: KvRole = "both"
    """What this engine does for others over nixl or tcp: prefill leaves prompts for them, decode fetches them."""

    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """What becomes of a request whose latents cannot be fetched: it ends with an error, or its prompt is computed here.
    """

    kv_host: str = "127.0.0.1"
    """Address at which other engines fetch prompts from this one; beyond loopback a key is needed."""

    kv_port: int = 0
    """Port of rank 0 for that, rank r has this + r; 0: any free one."""

    kv_allow_hosts: str = ""
    """Hosts, with commas between them, that requests may name to fetch latents from; loopback always may be."""

    kv_key_file: str | None = None
    """File (mode 0600) with the key that engines prove to each other; unset: loopback only."""

    kv_lease_s: float = 30.0
    """Seconds that a computed prompt is kept for whoever is to fetch it; who waits for room says so and extends it."""

    kv_load_timeout_s: float = 30.0
    """Seconds that fetching latents may take once there is room for them."""

    kv_host_bytes: int = 1 << 30
    """Bytes of host memory a rank keeps pages in, with the connector host."""

    kv_path: str = ""
    """Folder of the connector file."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in STORES + PEERS:
                raise ValueError(
                    f"kv_connector is {self.kv_connector!r}; it must name nixl, tcp, file or host, or several with "
                    "commas between them, e.g. host,tcp"
                )
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"kv_connector is {self.kv_connector!r}; it must name each connector once, e.g. host,tcp")
        for name, known in (("kv_role", get_args(KvRole)), ("kv_load_failure_policy", ("fail", "recompute"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        for name in ("kv_lease_s", "kv_load_timeout_s"):
            if not 0 < getattr(self, name) <= 86400:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 86400, e.g. 30")
        at_least("kv_port", self.kv_port, 0, neighbour=0)
        at_least("kv_host_bytes", self.kv_host_bytes, 1, neighbour=1 << 30)
        if "file" in self.names and not self.kv_path:
            raise ValueError("kv_path is empty; the connector file needs a folder, e.g. --kv-path /var/tmp/pages")
        if set(self.names) & set(PEERS) and self.kv_host not in LOOPBACK and self.kv_key_file is None:
            raise ValueError(
                f"kv_host is {self.kv_host!r} and there is no kv_key_file; without a key it must be loopback, "
                "e.g. 127.0.0.1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The connectors, in the order in which they are asked."""
        return tuple(name.strip() for name in self.kv_connector.split(",") if name.strip())

    @property
    def peers(self) -> tuple[str, ...]:
        """Those that fetch from other engines."""
        return tuple(name for name in self.names if name in PEERS)

    @property
    def stores(self) -> tuple[str, ...]:
        """Those that keep pages by what they hold."""
        return tuple(name for name in self.names if name in STORES)

    def allows(self, host: str) -> bool:
        """Whether a request may name this host."""
        listed = [name.strip() for name in self.kv_allow_hosts.split(",")]
        return host in LOOPBACK or (host != "" and host in listed and self.kv_key_file is not None)

    def key(self) -> bytes:
        """The key; empty where there is none. ValueError for a file that others can read, or that is empty."""
        if self.kv_key_file is None:
            return b""
        path = Path(self.kv_key_file)
        if not path.is_file():
            raise ValueError(f"kv_key_file is {self.kv_key_file!r}; there is no such file")
        if path.stat().st_mode & 0o077:
            raise ValueError(f"kv_key_file is {self.kv_key_file!r}, and others can read it; chmod 600 {path}")
        key = path.read_bytes().strip()
        if len(key) < 16:
            raise ValueError(
                f"kv_key_file is {self.kv_key_file!r}; it must hold at least 16 bytes, e.g. 32 random ones"
            )
        return key
