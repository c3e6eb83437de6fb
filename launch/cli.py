"""The command `serried`: picks the command, and turns refusals and Ctrl-C into one line and an exit code.

    0    done
    1    it went wrong while running, or the answer is no: it does not fit (`plan`), is not certain (`doctor`)
    2    it was asked for wrongly: a flag, a file, a model that cannot be run
    130  Ctrl-C

Knows the commands by name only; each reads its own flags. Nothing of the engine is imported before the house has been
checked: with a room of somebody else's, the import itself would fail.

The streams may be closed, full, or unable to spell a letter. An answer is never lost to a letter, nor to what is said
beside it; when standard output itself cannot be written, that is the one thing said.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO, cast

from .groups.as_rank import Child, take_child
from .groups.house import home, house_fault, room_folders
from .service.front_start import comes_first, front_command

ABOUT = """\
usage: serried COMMAND ...

A wide expert-parallel decode engine for DeepSeek-style MLA mixture-of-experts models.

commands:
  bench      Measure parts of the engine on this machine; `serried bench --help` lists which.
  config     Print every setting, its value, and where it comes from.
  doctor     Look at a machine or a group and say what will not work; or which rank of a failed group stopped first.
  eplb       Show how evenly experts are used in a recording, and what each placement policy would gain.
  generate   Decode prompts and print the text.
  plan       Say what a model needs on each rank, and what to run on so many GPUs, without loading it.
  serve      Serve a model over gRPC, with a front door of its own before the ranks.
  shard      Write one file for each rank's share of a checkpoint, for fast starts.
  simulate   Show what the prefill cadence does to ranks in lockstep, without a device.
  top        Watch the ranks of running groups: tokens, cache, queues, waits, load of experts.

examples:
  serried generate profiles/models/tiny-v3 --prompt 'The "assert" statement' --ranks 4
  serried generate MODEL_FOLDER --prompts requests.jsonl --json > answers.jsonl
  serried plan deepseek-v3 --gpus 32 --context 2048 --tpot-ms 50
  serried simulate --scenario one-long-prefill --prefill-schedule-interval 4
  serried doctor FLIGHT_FOLDER
  serried eplb routing --num-redundant-experts 32

`serried COMMAND --help` lists a command's flags; `serried --version` says which this is.
"""
COMMANDS = ("bench", "config", "doctor", "eplb", "generate", "plan", "serve", "shard", "simulate", "top")

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `serried` with `argv` (default: the process's own arguments); returns the exit code."""
    child, words = take_child(sys.argv[1:] if argv is None else argv)
    with _streams():
        try:
            return _run_and_flush(words, child)
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED
        except OutputLost as lost:
            # Whoever read our output may just have had enough (`| head`); that is no fault.
            if not isinstance(lost.__cause__, BrokenPipeError):
                _say(f"standard output {lost}")
            return FAILED


def _run_and_flush(words: list[str], child: Child | None) -> int:
    if sys.stdout is None:
        raise OutputLost("is closed, so answers have nowhere to go; send them to a file or to /dev/null")
    try:
        return _run(words, child)
    finally:
        sys.stdout.flush()


def _run(words: list[str], child: Child | None) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(ABOUT, end="")
        return DONE if words else REFUSED
    if words[0] in ("-V", "--version"):
        print(f"serried {version('serried')}")
        return DONE
    if words[0] not in COMMANDS:
        _say(f"{words[0]!r} is not a command; the commands are {', '.join(COMMANDS)}, e.g. serried plan --help")
        return REFUSED
    fault = house_fault(room_folders(), home=home())
    if fault:
        _say(fault)
        return REFUSED
    if child is None and comes_first(words, os.environ):
        sys.stdout.flush()
        os.execv(sys.executable, front_command(*words))  # the same process goes on without the engine
    with _interrupts_held():
        # Deferred until the house is known to be ours; see above.
        from .commands import run_command

    return run_command(words[0], words[1:], child)


def _say(line: str) -> None:
    print(f"serried: {line}", file=sys.stderr)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits for the end of this: amid an import, libraries swallow it, or end by it in ways of their own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class OutputLost(Exception):
    """Standard output cannot be written. Not an OSError, so that it is not taken for one of another file."""


class Guarded:
    """A text stream that escapes letters it cannot spell, and calls `on_failure` when it cannot be written at all."""

    def __init__(self, stream: TextIO, on_failure: Callable[[OSError], None]) -> None:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self._stream = stream
        self._on_failure = on_failure

    def write(self, text: str) -> int:
        with self._failures():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._failures():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Python flushes what is left once more at exit, and would complain again.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._on_failure(error)


@contextmanager
def _streams() -> Iterator[None]:
    """The process's two outputs, guarded for as long as this lasts and nobody puts others in their place."""
    _fill_descriptors()
    before = sys.stdout, sys.stderr  # None where the descriptor was closed from the beginning
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out = cast(TextIO, Guarded(sys.stdout, _lose_output)) if sys.stdout else sys.stdout
        err = cast(TextIO, Guarded(sys.stderr or nowhere, _lose_notes))
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            sys.stdout = before[0] if sys.stdout is out else sys.stdout
            sys.stderr = before[1] if sys.stderr is err else sys.stderr


def _fill_descriptors() -> None:
    """Open 0, 1 and 2 where they are closed: else the next file or socket gets one, and what is written to it."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)


def _lose_output(error: OSError) -> NoReturn:
    raise OutputLost(f"cannot be written: {error.strerror or error}") from error


def _lose_notes(_: OSError) -> None:
    """Decoding goes on without them: there is nowhere left to say so, and the answers are worth more."""
