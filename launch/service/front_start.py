"""Whether a command begins with the front door, and how that process is started. Imports nothing that takes time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from ..groups.house import home
from ..groups.world import detect

DESCRIPTOR = "SERRIED_FRONT_DOOR"
"""Environment variable that names the descriptor of rank 0's lifeline."""
ENDING_S = 15.0
"""How long the processes of a group may take to end."""
DONE, FAILED, INTERRUPTED = 0, 1, 130

_BARE = """\
import sys, types
sys.path.insert(0, sys.argv[1])
for room in ("ep", "moe", "eplb", "runtime"):
    package = sys.modules[room] = types.ModuleType(room)
    package.__path__ = [sys.argv[1] + "/" + room]
import importlib
sys.exit(importlib.import_module(sys.argv[2]).main(sys.argv[3:]))
"""


def front_command(*arguments: str, module: str = "launch.service.front_door") -> list[str]:
    """The command line that calls `main(arguments)` of `module` without torch; its exit code is what that returns.

    The rooms that would import torch are bare packages there, so that single modules of them can be had.
    """
    return [sys.executable, "-P", "-c", _BARE, str(home()), module, *arguments]


def comes_first(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command of these words, begun by a person, is the front door's: `serve`, unless a launcher's rank or
    rank 0 of a front door reads them, or they ask for help. What is wrong with them is for a rank to say."""
    if words[:1] != ["serve"] or DESCRIPTOR in environ or {"-h", "--help"} & set(words):
        return False
    if find_spec("zmq") is None or find_spec("grpc") is None:
        return False
    try:
        return detect(environ).size == 1
    except ValueError:
        return False
