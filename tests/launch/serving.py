"""A server of tests: `serried serve` with lines of JSON in gRPC's place (see programs/line_service.py)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch.service.front_start import front_command

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "launch" / "programs"
TINY = "profiles/models/tiny-v3"
START_S = 90.0


class Line:
    """One question and its answers, as they come."""

    def __init__(self, path: Path, question: dict[str, Any], *, timeout_s: float = 60.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        self._socket.connect(str(path))
        self._socket.sendall(json.dumps(question).encode() + b"\n")
        self._file = self._socket.makefile()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        line = self._file.readline()
        if not line:
            self.close()
            raise StopIteration
        return json.loads(line)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@dataclass
class Served:
    """A running server. `said` is its standard error, once it has ended."""

    process: subprocess.Popen[str]
    path: Path
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path, *words: str, model: str = TINY) -> Served:
        path = folder / "line"
        python_path = os.pathsep.join([str(PROGRAMS), str(PROGRAMS / "no_unpickling")])
        command = front_command("serve", model, "--num-blocks", "256", *words, module="line_service")
        environ = os.environ | {"LINE_SERVICE": str(path), "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        with (folder / "said").open("w") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=said, stdin=subprocess.DEVNULL, text=True)
        served = cls(process, path)
        try:
            served.wait_for_path()
            served.one({"info": None})
        except BaseException:
            served.end()
            raise
        return served

    def wait_for_path(self) -> None:
        until = time.monotonic() + START_S
        while not self.path.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"it did not start: {self.process.poll()}\n{self.said}")
            time.sleep(0.05)

    def ask(self, question: dict[str, Any], *, timeout_s: float = 60.0) -> Line:
        line = Line(self.path, question, timeout_s=timeout_s)
        self.lines.append(line)
        return line

    def one(self, question: dict[str, Any]) -> Any:
        [answer] = self.ask(question, timeout_s=START_S)
        return answer

    def family(self) -> dict[str, psutil.Process]:
        """The processes: "front", and each rank by number."""
        found = {"front": psutil.Process(self.process.pid)}
        for child in found["front"].children(recursive=True):
            words = child.cmdline()
            if "launch" in words and "serve" in words:
                found[words[words.index("--as-rank") + 1].split("/")[0] if "--as-rank" in words else "0"] = child
        return found

    @property
    def said(self) -> str:
        return self.path.with_name("said").read_text()

    def wait(self, limit_s: float = 60.0) -> int:
        return self.process.wait(limit_s)

    def end(self) -> None:
        for line in self.lines:
            line.close()
        if self.process.poll() is None:
            family = list(self.family().values())
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            for one in family:
                if one.is_running():
                    one.kill()
