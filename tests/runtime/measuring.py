"""Runs programs/overlap_ranks.py: ranks that are processes measure, and tell a test what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "runtime" / "programs" / "overlap_ranks.py"
MODEL = ROOT / "profiles" / "models" / "tiny-v3"
LIMIT_S = 100.0


def run(tmp_path: Path, *jobs: str) -> dict[str, list[Any]]:
    """What the ranks found, by job."""
    report = tmp_path / "report.json"
    with subprocess.Popen(
        [sys.executable, PROGRAM, report, MODEL, *jobs],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            output, _ = program.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise
    assert program.returncode == 0, output
    return json.loads(report.read_text())
