"""The gateway `smg` beside the server, for --openai: OpenAI's HTTP API, chat templates and tokenising, in its process.

It is a program of its own (extra `openai`), found beside this Python or on the path. It ends with the server, also when
that is killed. When it ends by itself, so does the server: whoever asked for both is not left with half. Knows its
flags; does not know the API it speaks.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..front.front_client import GroupInfo
from .logs import Log
from .serve_config import ServeConfig

STOP_S = 10.0
PROGRAM = "smg"

TIE = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {signal}, 0, 0, 0)
if os.getppid() == {me}:
    os.execv(sys.argv[1], sys.argv[1:])
"""
"""prctl's PR_SET_PDEATHSIG is 1; who has lost its parent before that has nothing to begin."""


class GatewayLost(Exception):
    """The gateway ended by itself. str() says with which code."""


class Gateway:
    """A running gateway."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    @classmethod
    def start(cls, config: ServeConfig, info: GroupInfo, *, port: int, log: Log) -> Gateway:
        """Start it for a server on `port`. Raises ValueError where it is not installed."""
        program = find_program()
        http_port = config.openai_port or free_port(config.host)
        metrics_port = config.openai_metrics_port or free_port(config.host)
        words = gateway_words(config, info, port=port, http_port=http_port, metrics_port=metrics_port)
        process = subprocess.Popen(
            [*tied_to_us(program), *words],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=quiet(os.environ),
            process_group=0,  # Ctrl-C reaches the server, which ends the gateway after its own requests
        )
        log.say("openai: the gateway starts", api=f"http://{config.host}:{http_port}/v1", pid=process.pid)
        return cls(process, http_port)

    def check(self) -> None:
        """Raises GatewayLost when it has ended."""
        if self._process.poll() is not None:
            raise GatewayLost(f"the gateway {PROGRAM} ended with code {self._process.returncode}")

    async def stop(self) -> None:
        """End it, with a moment to say good-bye to its own clients."""
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def find_program() -> str:
    """Where the gateway lies. Raises ValueError saying how to get it."""
    beside = Path(sys.executable).with_name(PROGRAM)
    found = str(beside) if beside.is_file() else shutil.which(PROGRAM)
    if found is None:
        raise ValueError(f"openai is set, but the program {PROGRAM} is not installed; pip install 'serried[openai]'")
    return found


def gateway_words(
    config: ServeConfig, info: GroupInfo, *, port: int, http_port: int, metrics_port: int
) -> Sequence[str]:
    """Its command line: one worker, and everything on the address that the server itself listens on."""
    words = ["launch", "--host", config.host, "--port", str(http_port)]
    words += ["--prometheus-host", config.host, "--prometheus-port", str(metrics_port)]
    words += ["--worker-urls", f"grpc://{config.host}:{port}", "--model-path", info.model_path]
    words += ["--policy", "cache_aware", "--health-check-interval-secs", "2"]
    words += ["--load-monitor-interval", "2", "--worker-startup-check-interval", "2", "--log-level", "warn"]
    return words


def quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without proxies: the gateway talks to this machine."""
    return {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}


def free_port(host: str) -> int:
    """A port that nobody has at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def tied_to_us(program: str) -> Sequence[str]:
    """Words that run `program`, which the system ends together with this process.

    A process asks for that itself: a function between fork and exec would do, but gRPC's threads forbid forks.
    """
    return [sys.executable, "-I", "-S", "-c", TIE.format(me=os.getpid(), signal=int(signal.SIGTERM)), program]
