"""What a user may set of the service in front of the ranks: where it listens, whom it lets in, and how much.

Knows names, defaults and ranges; does not know the model or the group. The docstrings under the fields are the command
line's help.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LogFormat = Literal["text", "json"]

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one request, one message and one connection may ask for at most."""

    max_n: int = 16
    """Answers to one prompt."""

    max_output_tokens: int | None = None
    """Tokens of one answer, also where the request names no number; unset: what the model's length leaves."""

    max_prompt_tokens: int | None = None
    """Tokens of a prompt; unset: what the model's length leaves."""

    max_stop: int = 16
    """Stop strings of a request."""

    max_stop_len: int = 256
    """Characters of a stop string."""

    max_message_bytes: int = 16 * 2**20
    """Bytes of one message to the server; longer ones are not read."""

    max_requests_per_connection: int = 4096
    """Requests that run at the same time for one connection. A gateway has one connection for all its users."""

    slow_reader_timeout_s: float = 30.0
    """A client that takes nothing for so long while there is something for it loses its request. What fits into the
    windows of its connection (some megabytes) counts as taken."""

    def __post_init__(self) -> None:
        for name in ("max_n", "max_stop_len", "max_message_bytes", "max_requests_per_connection"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_output_tokens", "max_prompt_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("max_stop", self.max_stop, 0)
        _above_zero("slow_reader_timeout_s", self.slow_reader_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the service listens, and how it behaves."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)

    host: str = "127.0.0.1"
    """Address to listen on, for gRPC and HTTP. Beyond loopback use --tls-cert and --token-file, too."""

    port: int = 50051
    """Port for gRPC; 0: any that is free."""

    http_port: int | None = None
    """Port for /health, /live, /started, /ready and /metrics; 0: any that is free; unset: the next after --port."""

    served_model_name: str | None = None
    """Name of the model as clients see it; unset: the name of its folder."""

    tls_cert: Path | None = None
    """PEM file with the server's certificate; gRPC is encrypted then. Needs --tls-key."""

    tls_key: Path | None = None
    """PEM file with the key of --tls-cert."""

    tls_client_ca: Path | None = None
    """PEM file with who signs clients' certificates; without one of those nobody is let in (mTLS)."""

    token_file: Path | None = None
    """File with a secret; gRPC calls must carry it as `authorization: Bearer SECRET`. Health checks need none."""

    log_format: LogFormat = "text"
    """Lines of the log: text, or json, an object a line."""

    stall_after_s: float = 30.0
    """Health is lost when requests run and no step has ended for so long."""

    drain_timeout_s: float = 60.0
    """Seconds that running requests get to end after SIGTERM; what is left then is aborted."""

    profile_dir: Path | None = None
    """Folder for the traces of StartProfile; unset: StartProfile is refused."""

    openai: bool = False
    """Start the gateway `smg` beside the server, and end it with it: it speaks OpenAI's HTTP API. Needs the extra
    openai."""

    openai_port: int = 8000
    """Port of --openai; 0: any that is free."""

    openai_metrics_port: int = 0
    """Port of the gateway's own metrics; 0: any that is free."""

    def __post_init__(self) -> None:
        for name in ("port", "openai_port", "openai_metrics_port"):
            _port(name, getattr(self, name))
        if self.http_port is not None:
            _port("http_port", self.http_port)
        for name in ("stall_after_s", "drain_timeout_s"):
            _above_zero(name, getattr(self, name))
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format is {self.log_format!r}; it must be text or json, e.g. text")
        self._check_tls()

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is {str(getattr(self, given))!r}; it needs {missing}, e.g. server.pem")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(f"tls_client_ca is {str(self.tls_client_ca)!r}; it needs tls_cert and tls_key")
        if self.openai and (self.tls_cert is not None or self.token_file is not None):
            field = "tls_cert" if self.tls_cert is not None else "token_file"
            raise ValueError(f"{field} is set, and openai, too: the gateway calls in plain text; leave one of them out")

    @property
    def http_port_or_next(self) -> int:
        """The port for HTTP; 0 for any."""
        if self.http_port is not None:
            return self.http_port
        return self.port + 1 if 0 < self.port < MAX_PORT else 0

    @property
    def is_open(self) -> bool:
        """Whether others than this machine's own processes can reach it."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"


def _port(name: str, value: int) -> None:
    if not 0 <= value <= MAX_PORT:
        raise ValueError(f"{name} is {value}; it must be from 0 to {MAX_PORT}, e.g. 50051")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} is {value}; it must be at least {low}, e.g. {max(low, 1)}")


def _above_zero(name: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; it must be above 0 and finite, e.g. 30")
