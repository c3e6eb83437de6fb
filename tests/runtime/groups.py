"""Groups of small processes for tests of the control plane and the pulses: start one, wait for its end, look at it."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from runtime.control.door import open_listener
from runtime.failure.bare import bare_script

STEP_S = 0.01
PROGRAM = Path(__file__).with_name("programs") / "beating_rank.py"
KEY = bytes(range(32))


@dataclass
class Group:
    """Ranks that run beating_rank.py. `said` and `errors`: lines on stdout and stderr of each rank, its pulse's too."""

    processes: list[subprocess.Popen[str]]
    scenario: dict[str, Any]
    said: list[list[str]] = field(default_factory=list)
    errors: list[list[str]] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)
    threads: list[Thread] = field(default_factory=list)

    @classmethod
    def start(cls, directory: Path, scenario: dict[str, Any], *, size: int = 4, **limits: float) -> Group:
        """scenario: steps, step_s, and by rank what it does: {"at": [step, phase], "deed": ...}."""
        pulse_hub, control_hub = open_listener("lo"), open_listener("lo")
        group = cls(processes=[], scenario={"steps": 10_000, "step_s": STEP_S, "ranks": {}} | scenario)
        for rank in range(size):
            listeners = (pulse_hub, control_hub)
            hubs = [str(hub.fileno() if rank == 0 else hub.getsockname()[1]) for hub in listeners]
            arguments = [str(rank), str(size), *hubs, KEY.hex(), str(directory), json.dumps(limits)]
            process = subprocess.Popen(
                bare_script(PROGRAM, *arguments, json.dumps(group.scenario)),
                pass_fds=[hub.fileno() for hub in listeners] if rank == 0 else [],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            group._follow(process)
        pulse_hub.close()
        control_hub.close()
        return group

    def _follow(self, process: subprocess.Popen[str]) -> None:
        rank = len(self.processes)
        self.processes.append(process)
        self.said.append([])
        self.errors.append([])

        def collect(stream: Any, lines: list[str]) -> None:
            with stream:
                for line in stream:
                    lines.append(line.rstrip("\n"))

        def wait() -> None:
            process.wait()
            self.ended[rank] = time.monotonic()
            process.stdin.close()

        for target, args in (
            (collect, (process.stdout, self.said[rank])),
            (collect, (process.stderr, self.errors[rank])),
        ):
            self.threads.append(Thread(target=target, args=args, daemon=True))
        self.threads.append(Thread(target=wait, daemon=True))
        for thread in self.threads[-3:]:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until every rank and every pulse has ended (a pulse keeps its rank's stderr open)."""
        end = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        alive = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        assert not alive, f"ranks {alive} still run: {self.errors}"
        assert not any(thread.is_alive() for thread in self.threads), f"a pulse outlives its rank: {self.errors}"

    def kill(self) -> None:
        """Leave nothing behind."""
        for rank, process in enumerate(self.processes):
            process.kill()
            process.wait()
            for pid in self.heard(rank, "pulse"):
                subprocess.run(["kill", "-KILL", str(int(pid))], stderr=subprocess.DEVNULL, check=False)

    def heard(self, rank: int, word: str) -> list[float]:
        """What a rank said behind `word`, line by line."""
        return [float(line.split()[1]) for line in list(self.said[rank]) if line.split()[0] == word]

    @property
    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]

    @property
    def seconds(self) -> float:
        """From the deed to the end of the last rank."""
        return max(self.ended.values()) - self._deed

    @property
    def slowness(self) -> float:
        """How many times as long as they slept the steps before the deed took, from 1 to 2; 2 where there were none."""
        [step] = [what["at"][0] for what in self.scenario["ranks"].values() if "at" in what] or [0]
        if step == 0:
            return 2.0
        ready = max(at for rank in range(len(self.processes)) for at in self.heard(rank, "ready"))
        return min(max((self._deed - ready) / (step * self.scenario["step_s"]), 1.0), 2.0)

    @property
    def _deed(self) -> float:
        [deed] = [at for rank in range(len(self.processes)) for at in self.heard(rank, "act")]
        return deed

    def words(self) -> dict[int, list[str]]:
        """The lines in which each rank says how the group ends."""
        return {rank: [line for line in lines if line.startswith("serried:")] for rank, lines in enumerate(self.errors)}
