"""The process around the commands: its streams, which may be odd or broken, and Ctrl-C while it is still importing."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = ("--num-blocks", "64", "--max-tokens", "1", "--temperature", "0")


def launch(words: str, **options) -> "subprocess.CompletedProcess[str]":
    """`serried` in a process of its own; `words` is shell, with redirections."""
    command = f"exec {sys.executable} -m launch {words}"
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options
    )


@pytest.fixture
def ascii_out(monkeypatch):
    """ascii_out(*words) -> what `serried` writes to a standard output as PYTHONIOENCODING=ascii makes it."""

    def run(*words: str) -> str:
        out = io.TextIOWrapper(raw := io.BytesIO(), "ascii")
        monkeypatch.setattr(sys, "stdout", out)
        assert main(words) == 0
        return raw.getvalue().decode("ascii")

    return run


def test_text_that_the_output_cannot_spell_is_written_as_escapes(ascii_out, tiny):
    out = ascii_out("generate", tiny, "--prompt", "né \U0001f600", *SHORT)
    assert "\nn\\xe9 \\U0001f600" in out
    assert out.endswith("[1 tokens, length]\n\n")


def test_json_that_the_output_cannot_spell_stays_json(ascii_out, tiny, tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "né", "id": "né"}', "utf-8")
    assert json.loads(ascii_out("generate", tiny, "--prompts", str(file), "--json", *SHORT))["id"] == "né"


FULL = "serried: standard output cannot be written: No space left on device\n"
CLOSED = "serried: standard output is closed, so answers have nowhere to go; send them to a file or to /dev/null\n"


@pytest.fixture
def full_disk():
    """A file that cannot be written, though it can be opened."""
    with Path("/dev/full").open("w", encoding="utf-8") as file:
        yield file


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "deepseek-v3"],
        ["plan", "deepseek-v3", "--json"],
        ["generate", "tiny-v3", "--prompt", "a", *SHORT],
        ["generate", "tiny-v3", "--prompt", "a", *SHORT, "--json", "--logprobs", "20", "--max-tokens", "32"],
    ],
)
def test_a_full_disk_is_one_sentence_and_exit_code_1(words, full_disk, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", full_disk)
    assert main(words) == 1
    assert ("\n" + capsys.readouterr().err).endswith("\n" + FULL)


def test_help_of_a_command_on_a_full_disk_is_one_sentence_too(full_disk, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", full_disk)
    assert main(["plan", "--help"]) == 1
    assert capsys.readouterr().err == FULL


def test_a_closed_output_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "tiny-v3", "--prompt", "a"]) == 1
    assert capsys.readouterr().err == CLOSED


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        ("--help >/dev/full", (1, FULL)),
        ("--help >&-", (1, CLOSED)),
        ("--help >&- 2>&-", (1, "")),
        ("nonsense 2>/dev/full", (2, "")),
        ("nonsense 2>&-", (2, "")),
    ],
)
def test_a_process_ends_with_the_code_that_is_promised_when_its_streams_are_broken(words, ending):
    done = launch(words, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == ending
    assert done.stdout == ""


def test_a_descriptor_that_was_closed_is_not_given_to_the_next_file_and_stays_open_for_children():
    program = (
        "import os; from launch.cli import main; main(['nonsense']); "
        "assert os.open('/dev/null', 0) > 2; assert all(map(os.get_inheritable, (0, 1, 2))); print('good')"
    )
    shell = f'exec {sys.executable} -c "{program}" 0<&- 2>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", shell], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.stdout == "good\n"


@pytest.mark.parametrize("closed", [False, True])
def test_answers_are_not_lost_when_only_what_is_said_beside_them_cannot_be_written(
    closed, full_disk, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stderr", None if closed else full_disk)
    assert main(["generate", "tiny-v3", "--prompt", "a", "--json", *SHORT]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"


def test_an_os_error_that_is_not_the_outputs_is_not_taken_for_it(monkeypatch):
    def broken(folders, *, home):
        raise BrokenPipeError("a socket's")

    monkeypatch.setattr("launch.cli.house_fault", broken)
    with pytest.raises(BrokenPipeError, match="a socket's"):
        main(["plan", "deepseek-v3"])


def test_the_streams_are_put_back(capsys):
    before = sys.stdout, sys.stderr
    main(["--help"])
    assert (sys.stdout, sys.stderr) == before


def test_bytes_on_the_command_line_that_are_no_text_are_refused(tiny, capsys):
    assert main(["generate", tiny, "--prompt", os.fsdecode(b"b\xffc")]) == 2
    assert capsys.readouterr().err == "serried: --prompt 1: not UTF-8 text: byte 0xff as character 2\n"


CTRL_C_DURING_AN_IMPORT = """
import os, signal, sys

class Swallower:
    # what Ctrl-C does to a library that catches too much while it is imported
    def find_spec(self, name, path=None, target=None):
        if name == "launch.commands":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass
            except KeyboardInterrupt:
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Swallower())
from launch.cli import main
sys.exit(main(["plan", "deepseek-v3"]))
"""


def test_ctrl_c_during_the_imports_ends_with_one_line_and_130():
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_DURING_AN_IMPORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "serried: interrupted\n")


def test_ctrl_c_is_heeded_again_after_the_imports(capsys):
    main(["plan", "deepseek-v3"])
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
