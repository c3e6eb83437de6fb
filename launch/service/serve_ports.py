"""Whether a service can have the ports it asks for, before a model is loaded for nothing."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from .serve_config import ServeConfig


def check_ports(config: ServeConfig) -> None:
    """Raises ValueError for a port that somebody has or that is forbidden, and for a host that is not this machine."""
    seen: dict[int, str] = {}
    for name, port in _wanted(config):
        if port in seen:
            raise ValueError(f"{name} is {port}, and so is {seen[port]}; each needs a port of its own, e.g. {port + 1}")
        seen[port] = name
        _try(config.host, name, port)


def _wanted(config: ServeConfig) -> Iterator[tuple[str, int]]:
    """Flags and ports, without those that are left open (0)."""
    ports = {"port": config.port, "http_port": config.http_port_or_next}
    if config.openai:
        ports |= {"openai_port": config.openai_port, "openai_metrics_port": config.openai_metrics_port}
    yield from ((name, port) for name, port in ports.items() if port)


def _try(host: str, name: str, port: int) -> None:
    """Take the port for a moment, as a server would."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = {errno.EADDRINUSE: "another program listens there", errno.EACCES: "this user may not listen there"}
            if error.errno not in why:
                rule = "it must be an address of this machine, e.g. 127.0.0.1"
                raise ValueError(f"host is {host!r}; {rule} ({error.strerror or error})") from error
            raise ValueError(
                f"{name} is {port}; {why[error.errno]} (on {host}): take another one, or 0 for any free one"
            ) from error
