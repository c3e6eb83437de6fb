"""Whether a service can have the ports it asks for, before a model is loaded for nothing."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from .serve_config import ServeConfig


def check_ports(config: ServeConfig) -> None:
    """Raises ValueError for a port that somebody has, or that cannot be had; OSError for a host that is none."""
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
            if error.errno == errno.EADDRINUSE:
                why = "another program listens there"
            elif error.errno == errno.EACCES:
                why = "this user may not listen there"
            else:
                raise
            raise ValueError(f"{name} is {port}; {why} (on {host}): take another one, or 0 for any free one") from error
