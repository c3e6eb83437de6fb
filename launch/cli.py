"""The command `serried`: picks the command, and turns refusals and Ctrl-C into one line and an exit code.

    0    done
    1    it went wrong while running, or what was asked about does not fit (`plan`)
    2    it was asked for wrongly: a flag, a file, a model that cannot be run
    130  Ctrl-C

Knows the commands by name only; each reads its own flags. Nothing of the engine is imported before the house has been
checked: with a room of somebody else's, the import itself would fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .house import home, house_fault, room_folders

ABOUT = """\
usage: serried COMMAND ...

A wide expert-parallel decode engine for DeepSeek-style MLA mixture-of-experts models.

commands:
  generate   Decode prompts and print the text.
  plan       Say what a model needs on each rank, and whether it fits, without loading it.

examples:
  serried generate profiles/models/tiny-v3 --prompt 'The "assert" statement' --ranks 4
  serried generate MODEL_FOLDER --prompts requests.jsonl --json > answers.jsonl
  serried plan deepseek-v3 --ranks 32 --gpu h200

`serried COMMAND --help` lists a command's flags.
"""
COMMANDS = ("generate", "plan")

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `serried` with `argv` (default: the process's own arguments); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(ABOUT, end="")
        return DONE if words else REFUSED
    if words[0] not in COMMANDS:
        _say(f"{words[0]!r} is not a command; the commands are {' and '.join(COMMANDS)}, e.g. serried plan --help")
        return REFUSED
    fault = house_fault(room_folders(), home=home())
    if fault:
        _say(fault)
        return REFUSED
    # Deferred until the house is known to be ours; see above.
    from .commands import run_command

    return run_command(words[0], words[1:])


def _say(line: str) -> None:
    print(f"serried: {line}", file=sys.stderr)
